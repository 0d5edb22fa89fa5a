"""The recipes' tasks (losses and metrics), their baselines, and text generation."""
