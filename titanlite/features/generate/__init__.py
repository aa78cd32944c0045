"""Generation and evaluation by generation."""
