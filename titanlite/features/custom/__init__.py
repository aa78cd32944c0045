"""Objectives, optimizers and metrics of the user's, which settings name as "package.module:name"."""
