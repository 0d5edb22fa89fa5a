"""Code that several loggers use."""
