"""Muon for the matrices of layers and experts."""
