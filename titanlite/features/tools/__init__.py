"""Commands on checkpoints and data, and the documents of a run."""
