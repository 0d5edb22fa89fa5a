"""The core: a run's events, callbacks, their context, their requests, and the manager. The package imports only the standard library."""
