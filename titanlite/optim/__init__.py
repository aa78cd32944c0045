"""Optimizer, the values that depend on the step, and the expert balancer."""
