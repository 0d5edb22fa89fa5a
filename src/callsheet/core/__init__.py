"""The core: lifecycle, callbacks, context, control and manager. It needs the standard library alone."""
