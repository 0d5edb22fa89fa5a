"""Packages with the APIs of other training systems: to run on callsheet, code needs to change only its imports."""
