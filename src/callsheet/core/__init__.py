"""The core: a run's events, callbacks, their context, their requests, and the manager. It imports only the standard library."""
