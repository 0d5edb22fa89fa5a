"""A short real training loop for each framework, one file each. The tests of bridges, the matrix and the benchmarks use them.

Each file has `NAME`, `VERSION` (of the framework), and a function `train` as in `job.TrainFunction`.
"""
