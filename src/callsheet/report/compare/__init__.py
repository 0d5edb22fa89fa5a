"""Compares runs: their settings, their metrics, the time of each part of a step, and limits that fail a CI job."""
