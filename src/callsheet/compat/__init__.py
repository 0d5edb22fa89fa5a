"""Packages with the names of other training systems: code that was written for them runs here with a changed import line."""
