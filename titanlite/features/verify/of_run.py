"""The certificates of a run: one in every checkpoint."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.checkpoint.commit import Certify
from titanlite.checkpoint.description import describe_versions
from titanlite.checkpoint.folder import CERTIFICATE_FILE
from titanlite.checkpoint.writer import Item
from titanlite.config.assets import base_model_of
from titanlite.config.parallelism import CHOSEN
from titanlite.features.verify.certificate import (
    digest_base,
    read_certificate,
    render,
    spell,
)
from titanlite.materialize import Read
from titanlite.metrics.run_folder import get_identity
from titanlite.trainer import Parts


def certify_checkpoints(parts: Parts) -> None:
    """Add a certificate to every checkpoint of the run. A resumed run keeps the recorded first step
    and sources.

    The first save digests the model that training began with. So the start does not wait for it,
    and with `checkpoint.async_mode` training does not wait either.

    Raises CheckpointError: the certificate of the checkpoint that the run resumes from is damaged.
    Collective: every rank must call.
    """
    run = parts.run
    stepper = parts.stepper
    job = run.job
    start = run.start
    if not job.checkpoint.enable:
        return
    known = on_first_rank(lambda: read_certificate(start.folder) if start else {})
    base = known.get("base", {})
    path = job.checkpoint.initial_load_path
    # `certify` must not hold the checkpointer, which holds it: the folder's lock ends with the run.
    group = parts.checkpointer.group
    entries = {entry.fqn: entry for entry in parts.plan.entries}
    origin = base_model_of(path)
    # settings that are chosen for the GPUs are recorded with the mesh
    identity = {
        key: value
        for key, value in get_identity(job).items()
        if "path" not in key and key not in CHOSEN
    }
    facts = {
        "model": run.model_config.family,
        "trained_from": origin and asdict(origin),
        "data": parts.loader.fingerprint,
        "run": identity,
        "optimizer": asdict(job.optimizer),
        "lora": asdict(replace(job.lora, init_from="")),
        "versions": describe_versions(),
        "mesh": {"degrees": str(run.dims.degrees), "ranks": dist.get_world_size()},
    }

    def row(item: Item, digest: int) -> dict[str, Any]:
        state = source = "carried"
        entry = entries.get(item.name)
        if entry is not None:
            state = "trained" if entry.tensor.requires_grad else "frozen"
            state = "buffer" if entry.info.kind == "buffer" else state
            source = "base" if isinstance(entry.source, Read) else str(entry.source)
        found = {
            "state": state,
            "source": source,
            "shape": list(item.piece.shape),
            "digest": spell(item.dtype, digest),
        }
        if state == "trained":
            found["gradient"] = item.name not in (stepper.unreached or ())
        before = known.get("tensors", {}).get(item.key, {})
        return found | {key: before[key] for key in ("source", "gradient") if key in before}

    def certify(step: int) -> Certify:
        try:
            if path and not base:
                base.update(digest_base(Path(path), group))
        except CheckpointError as error:
            if dist.get_rank() == 0:
                logger.warning("certificate: without digests of the base: %s", error)

        def make(items: Sequence[Item], digests: Mapping[Hashable, int]) -> dict[str, bytes]:
            done = stepper.first
            first = known.get("first_step")
            if done is not None and run.first_step == 0:
                first = f"loss {done.loss.item():.4g}, gradient norm {done.grad_norm.item():.4g}"
            rows = {item.key: row(item, digests[item.key]) for item in items}
            parts = {"step": step, "first_step": first, "tensors": rows, "base": base}
            return {CERTIFICATE_FILE: render(facts | parts)}

        return make

    parts.checkpointer.certify(certify)
