"""The parts that every run needs, whichever loop it uses: lifetime, records, agreement between ranks, boundaries, checkpoints,
the folder's lock.
"""
