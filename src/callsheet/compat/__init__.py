"""The names of other training systems. Code that was written for them runs here when its import line is changed."""
