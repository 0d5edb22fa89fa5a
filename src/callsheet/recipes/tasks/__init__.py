"""The recipes' tasks (losses and metrics), baselines and text generation."""
