"""Packages with the APIs of other training systems: code written for these systems runs on callsheet if only its imports are changed."""
