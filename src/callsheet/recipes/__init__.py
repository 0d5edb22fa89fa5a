"""Recipes: one readable file for each kind of job, run with `callsheet train`."""
