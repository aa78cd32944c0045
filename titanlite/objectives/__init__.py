"""Objectives: what a batch is trained for. Each maps (model, batch) to sums that the trainer divides and adds up.

Next-token prediction is for pretraining and supervised fine-tuning, direct preference optimization for pairs of a
chosen and a rejected answer.
"""

from titanlite.features.dpo.objective import DPO
from titanlite.features.dpo.reference import AdaptersOff, CachedReference, describe_weights
from titanlite.objectives.build import build_objective
from titanlite.objectives.objective import NextToken, Objective, ObjectiveSums

__all__ = [
    "DPO",
    "AdaptersOff",
    "CachedReference",
    "NextToken",
    "Objective",
    "ObjectiveSums",
    "build_objective",
    "describe_weights",
]
