"""`build_model`: whichever implementation a configuration is of."""

import torch

from titanlite.base.log import logger
from titanlite.config.model import AnyModelConfig, TransformersConfig
from titanlite.features.transformers.build import build_transformers
from titanlite.models.decoder import build_decoder
from titanlite.models.interface import Model


def build_model(config: AnyModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """Describe the model on the meta device: the native decoder, or the class of transformers that stands in for it.

    Raises:
        ConfigError: transformers cannot build it.
    """
    if isinstance(config, TransformersConfig):
        logger.info("model: transformers' %s, because: %s", config.architecture, config.why)
        return build_transformers(config, dtype)
    return build_decoder(config, dtype)
