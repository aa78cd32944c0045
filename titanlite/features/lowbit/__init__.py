"""Frozen weights in block formats of 8 and 4 bits."""
