"""The core: lifecycle, callbacks, context, control and manager. It imports only the standard library."""
