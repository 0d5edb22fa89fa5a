"""Packages with the APIs of other training systems. Code for these systems runs on callsheet after its imports are changed."""
