"""Lanes: threads and processes that call slow callbacks beside training."""
