"""Training data, tokenizer and training loop of the small Clover checkpoint."""
