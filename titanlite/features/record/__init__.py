"""Records of a run next to its checkpoints: plan.json, environment.json, the model card, uploads."""
