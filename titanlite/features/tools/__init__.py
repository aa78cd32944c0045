"""Commands on checkpoints and data."""
