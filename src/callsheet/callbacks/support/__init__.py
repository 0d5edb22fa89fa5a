"""Code that several callbacks use."""
