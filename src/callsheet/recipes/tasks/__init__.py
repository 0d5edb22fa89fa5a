"""Tasks, baselines and text generation of the recipes."""
