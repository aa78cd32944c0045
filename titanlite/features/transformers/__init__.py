"""transformers' classes, for models without a native family."""
