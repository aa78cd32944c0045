"""From configuration to objective."""

from titanlite.config import JobConfig
from titanlite.objectives.dpo import DPO
from titanlite.objectives.objective import NextToken, Objective
from titanlite.objectives.reference import AdaptersOff, CachedReference


def build_objective(job: JobConfig) -> Objective:
    """The objective that `training.objective` names. That of cached references must be filled before it is used."""
    if job.training.objective == "next_token":
        return NextToken()
    section = job.dpo
    adapters_off = section.reference == "adapters_off" or (section.reference == "auto" and job.lora.rank > 0)
    return DPO(section.beta, section.label_smoothing, AdaptersOff() if adapters_off else CachedReference())
