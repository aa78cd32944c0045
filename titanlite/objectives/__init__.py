"""Objectives: what a batch is trained for. Each maps (model, batch) to sums that the trainer divides and adds up.

Next-token prediction is for pretraining and supervised fine-tuning, direct preference optimization for pairs of a
chosen and a rejected answer.
"""
