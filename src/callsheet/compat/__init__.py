"""The seed systems' own names: code that was written for them runs when its import line is changed."""
