"""Plugins for axolotl and ms-swift, which train with the Hugging Face Trainer: they add callsheet's callbacks to it."""
