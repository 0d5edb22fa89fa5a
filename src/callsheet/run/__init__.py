"""What every run needs, whichever loop it uses: lifetime, metrics records, agreement of ranks, checkpoints, the folder's lock."""
