"""AdamW with moments, and weights, in bfloat16 that are rounded stochastically."""
