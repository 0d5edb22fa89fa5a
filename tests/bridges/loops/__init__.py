"""Loops: a short real training in each framework, one file each, for the tests of its bridge, the matrix and the benchmarks.

Each has `NAME`, `VERSION` (of the framework), and a function `train` as in `job.TrainFunction`.
"""
