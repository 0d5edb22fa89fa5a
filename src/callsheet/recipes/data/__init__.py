"""Data of the recipes: rows, texts, images, and how they become batches."""
