"""What every run needs, whichever loop drives it: lifetime, records, agreement between ranks, boundaries, checkpoints, the lock of its folder."""
