"""`python -m titanlite verify FOLDER [--base MODEL]`: report what a run really trained.

The folder may come from any trainer: a Hugging Face model, or adapters of peft.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from titanlite.assemble import build_model
from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.base.text import Parser, command
from titanlite.checkpoint.folder import ADAPTER_FILE, read_header
from titanlite.checkpoint.hf_model import weights_of
from titanlite.features.lora.layers import root_of
from titanlite.features.tools.models import MODEL_HELP, find_base, find_model
from titanlite.features.verify import verify_folder
from titanlite.materialize import build_plan
from titanlite.models.families import any_model_config_from_hf

_NOT_A_MODULE = r"^base_model\.model\.|(\.base_layer)*\.lora_.*|\.(weight|bias)$"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit code 0, 1 if a check fails, 2 if there is nothing to verify."""
    parser = Parser("verify", "Check a model or adapters, of any trainer: docs/verify.md.")
    parser.add_argument("folder", metavar="FOLDER", help=MODEL_HELP)
    parser.add_argument("--base", help="model that training began with: a folder or hub id")
    parser.add_argument("--frozen", default="", help="pattern of the keys that were not trained")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    known = parser.parse_args(argv)
    torch.set_num_threads(1)  # files are read with one thread per core
    folder = find_model("verify", known.folder)
    base = find_model("verify", known.base) if known.base else None
    problems = list[str]()
    notes = list[str]()
    try:
        if (folder / ADAPTER_FILE).exists():
            base = base or find_base("verify", folder)
            problems = _check_modules(folder, base)
        else:
            model = build_model(any_model_config_from_hf(folder, "verify"))
            build_plan(model, [weights_of(folder, model)])
    except ConfigError as error:
        if not list(folder.glob("*config.json")):
            raise
        notes = [f"not compared with the class of the model: {error}"]
    except TitanliteError as error:
        problems = str(error).split("\n  ")
    report = verify_folder(folder, base, frozen=known.frozen)
    report.problems[:0] = problems
    report.notes += notes
    print(json.dumps(asdict(report), indent=1) if known.json else report)
    return 1 if report.problems else 0


def _check_modules(folder: Path, base: Path) -> list[str]:
    """Return the problems of stored adapters whose module is missing in the model in `base`."""
    model = root_of(build_model(any_model_config_from_hf(base, "verify")))
    modules = dict(model.named_modules())
    targets = {key: re.sub(_NOT_A_MODULE, "", key) for key in read_header(folder / ADAPTER_FILE)}
    return [
        f"{key}: the model has no module {name}. The adapter is for another one."
        for key, name in targets.items()
        if name not in modules
    ]
