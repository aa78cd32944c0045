"""Datasets tokenized while they are read, and mixtures of datasets."""
