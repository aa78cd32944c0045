"""Estimate of a run before its start: memory, bytes read, communication, time. Needs no GPU and no
weights.
"""
