"""Packages that mirror the APIs of other training systems, so that code for these runs on callsheet with changed imports."""
