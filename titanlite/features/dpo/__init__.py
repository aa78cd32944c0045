"""Direct preference optimization (arXiv:2305.18290)."""
