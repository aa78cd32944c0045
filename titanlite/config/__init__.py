"""Configuration: TOML files and command-line overrides, checked against a dataclass schema before torch is imported."""

from titanlite.config.load import load_config, save_resolved
from titanlite.config.model import ModelConfig, RopeScaling
from titanlite.config.schema import JobConfig

__all__ = ["JobConfig", "ModelConfig", "RopeScaling", "load_config", "save_resolved"]
