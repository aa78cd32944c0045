"""Diagnosis of faults during training: find the cause, or end the run with an error."""
