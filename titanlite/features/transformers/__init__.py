"""Models of transformers that no native family covers."""
