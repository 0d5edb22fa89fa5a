"""Lanes: threads and processes that call slow callbacks while training continues."""
