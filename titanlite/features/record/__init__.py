"""Records of a run next to its checkpoints: plan.json, environment.json, the model card, the upload."""

import json
from pathlib import Path
from typing import Any

from titanlite.base.files import replace_file
from titanlite.base.log import logger


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a file that only describes the run: what cannot be written is a warning."""
    try:
        replace_file(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        logger.warning("cannot write %s: %s.", path, error.strerror or error)
