"""Code that several loggers share."""
