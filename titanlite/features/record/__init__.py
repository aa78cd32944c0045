"""Records of a run next to its checkpoints: environment.json, the model card, uploads."""
