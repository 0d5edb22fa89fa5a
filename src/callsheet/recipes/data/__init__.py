"""The data of the recipes: rows, texts and images, and how batches are made from them."""
