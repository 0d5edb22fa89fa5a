"""Runs a training script unchanged, with callbacks that observe its training loop: `callsheet exec train.py`."""
