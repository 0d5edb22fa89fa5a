"""Compare runs: what differs between them, their values with spread, where the time of a step goes, and a gate for CI."""
