"""Configuration: TOML files and command-line overrides, checked against a dataclass schema before
torch is imported.
"""

from titanlite.config.load import find_changes, format_changes, load_config, save_resolved
from titanlite.config.model import AnyModelConfig, ModelConfig, RopeScaling, TransformersConfig
from titanlite.config.schema import JobConfig
