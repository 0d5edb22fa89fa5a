"""Tasks, schedules, baselines and text generation of the recipes."""
