"""Plugins for programs that train with the Hugging Face Trainer as a configuration says: the configuration names the plugin."""
