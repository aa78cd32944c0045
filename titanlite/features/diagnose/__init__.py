"""Diagnosis of faults during training: find the cause, or refuse to go on."""
