"""Packages with the APIs of other training systems: code for these systems runs on callsheet after changing its import lines."""
