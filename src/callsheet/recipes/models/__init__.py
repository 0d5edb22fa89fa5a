"""The models, tokenizers and processors of the recipes."""
