"""Homes: a short real training in each framework, one file each, for the tests of its bridge, the matrix and the benchmark.

Each has `NAME`, `VERSION` (of the framework), and `train` as `job.Home` says.
"""
