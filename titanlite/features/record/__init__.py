"""What a run leaves for people beside checkpoints: plan.json, environment.json, the model card, the upload."""
