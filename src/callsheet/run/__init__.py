"""The parts of a run that are the same for every training loop, such as metrics records, checkpoints and the run's lock.

These parts fire the events for the run's start and end, make metrics records, let all ranks act on a request at the same step,
save and load checkpoints, and lock the run's folder.
"""
