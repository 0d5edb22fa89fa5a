"""Plugins that add callsheet's callbacks to axolotl and ms-swift, which train with the Hugging Face Trainer."""
