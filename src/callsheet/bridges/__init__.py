"""Bridges: callsheet's callbacks in other people's loops, and theirs in ours."""
