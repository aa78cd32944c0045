"""Settings that a run leaves open, chosen for its GPUs."""
