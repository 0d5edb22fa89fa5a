"""The core of callsheet: events, callbacks, their context and requests, and the manager. It imports only the standard library."""
