"""The warning about trained parameters that have no gradient."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch.distributed as dist
from torch import nn

from titanlite.base.events import record_event
from titanlite.base.log import logger
from titanlite.base.text import fold_name, format_count, list_names
from titanlite.features.record.run_files import record_trained
from titanlite.materialize.layout import num_values
from titanlite.materialize.plan import clean_name
from titanlite.optim.optimizer import count_parameters

_MOST_PATTERNS = 8  # that a warning lists


def report_unreached(folder: Path, model: nn.Module, names: Sequence[str], step: int) -> None:
    """Warn on rank 0 about the trained parameters `names`, which got no gradient in `step`, and
    correct the number of trained parameters in the run's `folder`.
    """
    if dist.get_rank() == 0:
        text, trained = describe_unreached(model, names)
        logger.warning("%s", text)
        record_event("unreached", text, step)
        record_trained(folder, trained)


def describe_unreached(model: nn.Module, names: Sequence[str]) -> tuple[str, int]:
    """Return the warning about trained parameters that got no gradient in the first step, with
    patterns of their names, and the number of values that remain trained.
    """
    params = {
        clean_name(name): param for name, param in model.named_parameters() if param.requires_grad
    }
    reached = params.keys() - set(names)
    patterns = {fold_name(name) for name in names}
    too_wide = {p for p in patterns if any(fnmatchcase(name, p) for name in reached)}
    folded = (name if fold_name(name) in too_wide else fold_name(name) for name in names)
    num_lost = sum(num_values(params[name]) for name in names)
    total, trained = count_parameters(model)
    trained -= num_lost
    text = (
        f"training: {format_count(len(names), 'tensor')} ({num_lost:,} elements) had no gradient "
        f"in the first step: {list_names(dict.fromkeys(folded), most=_MOST_PATTERNS)}. They did "
        "not contribute to its loss and are unchanged, so "
        f"{trained / 1e6:,.3f} M of {total / 1e6:,.3f} M parameters are trained. To "
        "keep them out of the optimizer, name them in optimizer.freeze."
    )
    if any(".indexer." in name for name in names):
        text += (
            " An indexer of sparse attention never gets one from the language loss: it only "
            "chooses keys."
        )
    return text, trained
