"""Capabilities that a run can do without: one folder each."""
