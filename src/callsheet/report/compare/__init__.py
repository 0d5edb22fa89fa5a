"""Compare runs: their settings, their metrics with spread, where the time of a step goes, and conditions that fail a CI job."""
