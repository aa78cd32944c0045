"""Optimizer, the values that follow the step, and the expert balancer."""
