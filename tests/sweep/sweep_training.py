"""Stages of `sweep_transformers.py` that compute: an optimizer step, its export, and greedy
generation.

A stage takes a case and returns a word, as those in `sweep_stages.py` do. The step goes through
titanlite's own path: described on meta, sharded (over one rank), filled from the folder that
transformers saved, stepped by `TrainStep`.
"""

import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sweep_stages import is_same

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.saving import save_hf_model, whole
from titanlite.assemble import build_on_meta, build_optimizer
from titanlite.checkpoint.folder import read_model_headers
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config import JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import IGNORE_INDEX, Batch
from titanlite.distributed import ParallelDims
from titanlite.features.generate.generate import generate
from titanlite.features.transformers.packing import restarting_positions
from titanlite.features.transformers.probes import check_documents_per_row
from titanlite.materialize import materialize
from titanlite.materialize.plan import clean_name
from titanlite.objective import NextToken
from titanlite.run import Run
from titanlite.train_step import TrainStep

_CPU = torch.device("cpu")
# lengths of the documents of each row; the rest is padding
_PACKED, _APART = ([[13, 11], [16], [1, 9, 14], [24]], [[24], [16], [20], [24]])
# AdamW's eps. If it were smaller, gradients that are only rounding errors would cause steps as
# large as real gradients do.
_STEPS, _LR, _EPS = 2, 1e-3, 1e-3
# All is float32, but packed rows sum in another order, and experts have other numbers of rows.
_LOSS_BOUND, _GRADIENT_BOUND, _FLOOR = 1e-6, 1e-4, 1e-3


def rows_of(packed):
    """Four rows of random documents, several in one if `packed`; labels are the next tokens,
    padding has none.
    """
    lengths, size = _PACKED if packed else _APART, 24
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 190, (len(lengths), size), generator=generator)
    labels, documents = torch.full_like(tokens, IGNORE_INDEX), torch.full_like(tokens, -1)
    for row, in_row in enumerate(lengths):
        start = 0
        for number, length in enumerate(in_row):
            labels[row, start : start + length - 1] = tokens[row, start + 1 : start + length]
            documents[row, start : start + length] = number
            start += length
        tokens[row, start:] = 0
    return Batch(tokens, labels, restarting_positions(documents, None), documents)


@dataclass(frozen=True)
class BatchWithInputs(Batch):
    """Rows of one document each, with the inputs besides text that a class needs, by row."""

    document_ids: Any = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def inputs(self):
        return self.extra

    def to(self, device):
        """Return the batch, which is on the CPU."""
        return self


def inputs_of(model_type, config, tokens):
    """Make random images and similar inputs for classes that need more than text, by row; mark
    their places in `tokens`.
    """
    rows, length = tokens.shape
    kinds = {
        "blip",
        "blip-2",
        "instructblip",
        "instructblipvideo",
        "idefics",
        "kosmos-2",
        "paligemma",
    }
    if model_type == "molmo2":
        return {"mm_token_type_ids": torch.zeros_like(tokens)}
    if model_type not in kinds:
        return {}
    between = {"instructblipvideo": (2,), "idefics": (1,)}.get(model_type, ())
    vision = getattr(config, "vision_config", getattr(config, "encoder", config))
    size = getattr(vision, "image_size", 64)
    generator = torch.Generator().manual_seed(4)
    found = {"pixel_values": torch.randn(rows, *between, 3, size, size, generator=generator)}
    if model_type.startswith("instructblip"):
        found["qformer_input_ids"] = tokens[:, -4:].clone()
    if model_type == "idefics":
        found["image_attention_mask"] = torch.ones(rows, length, 1, dtype=torch.int64)
    if model_type == "kosmos-2":
        found["image_embeds_position_mask"] = (
            torch.arange(length) < config.latent_query_num
        ).expand(rows, -1)
    places = {}
    if model_type == "paligemma":
        places["paligemma"] = (size // vision.patch_size) ** 2
    places |= {
        kind: config.num_query_tokens for kind in kinds if hasattr(config, "num_query_tokens")
    }
    for name in ("image_token_id", "image_token_index", "video_token_index"):
        token = getattr(config, name, None)
        if model_type in places and isinstance(token, int):
            tokens[:, : places[model_type] * (between[0] if between else 1)] = token
            break
    if model_type == "paligemma":  # what follows the image is to be predicted
        found["token_type_ids"] = (
            (torch.arange(length) >= places["paligemma"]).to(torch.int64).repeat(rows, 1)
        )
    return found


@dataclass
class Trained:
    """The result of some optimizer steps.

    Attributes:
        losses: Mean loss of each step.
        gradients: The full gradients of the first step, by name.
        model: The model after the steps, and its `plan`; of titanlite only.
        batch: The training batch of all ranks.
        norm: The norm of all gradients of the first step, as titanlite reports it.
        kind: The kind of rows: packed, apart (one document in each), or with inputs besides text.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    model: Any = None
    plan: Any = None
    batch: Any = None
    norm: float = 0.0
    kind: str = "packed"

    def difference(self, other):
        """Describe differences from `other` that exceed rounding; empty if it has none."""
        for step, (loss, expected) in enumerate(
            zip(self.losses, other.losses, strict=True), start=1
        ):
            if not abs(loss - expected) <= _LOSS_BOUND * abs(expected):
                return f"loss {loss:.8g} of step {step}, of transformers {expected:.8g}"
        names = sorted(self.gradients.keys() | other.gradients.keys())
        norm = torch.stack([grad.norm() for grad in other.gradients.values()]).norm()
        if not abs(self.norm - norm) <= _GRADIENT_BOUND * norm:
            return f"gradient norm {self.norm:.8g}, of transformers {norm:.8g}"
        floor = _FLOOR * norm
        unlike = []
        for name in names:
            got, wanted = (of.gradients.get(name, torch.zeros(())) for of in (self, other))
            error = (got - wanted).norm() / torch.maximum(wanted.norm(), floor)
            if not error <= _GRADIENT_BOUND:
                unlike.append(f"{name} by {error:.2g}")
        return f"{len(unlike)} of {len(names)} gradients, among them {unlike[0]}" if unlike else ""


def our_steps(
    config,
    folder,
    degrees,
    *,
    recompute="none",
    precision="float32",
):
    """Take optimizer steps from the weights in `folder`, on all ranks. Collective: every rank must
    call.
    """
    job = JobConfig()
    job.training.max_norm, job.training.steps = 0.0, _STEPS
    job.optimizer.lr, job.optimizer.eps, job.optimizer.weight_decay = _LR, _EPS, 0.0
    job.lr_scheduler.warmup_steps, job.lr_scheduler.min_lr_factor = 0, 1.0
    job.activation_checkpoint.mode = recompute
    job.training.mixed_precision_param = precision
    dims = ParallelDims.build(degrees, "cpu")
    run = Run(job, config, dims, _CPU)
    model = build_on_meta(run)
    plan = materialize(model, _CPU, [weights_of(folder, model)], seed=job.training.seed)
    optimizer = build_optimizer(job, model, dims)
    batch = rows_of(packed=False)
    extra = inputs_of(config.family, model.transformers_model.config, batch.tokens)
    if extra:
        labels = batch.labels.where(torch.arange(batch.labels.shape[1]) >= 8, IGNORE_INDEX)
        batch, kind = BatchWithInputs(batch.tokens, labels, None, None, extra), "inputs"  # type: ignore[arg-type]
        job.data.dataset = "images"
    else:
        job.data.packing = model.find_facts(_CPU).keeps_apart
        batch, kind = (rows_of(packed=True), "packed") if job.data.packing else (batch, "apart")
    assert check_documents_per_row(job, model, _CPU) == []
    gradients = {}

    def note(*args):
        for name, param in model.named_parameters():
            if param.grad is not None:
                gradients.setdefault(clean_name(name), whole(param.grad).clone())

    optimizer.register_step_pre_hook(note)
    stepper = TrainStep(run, model, optimizer, NextToken())
    mine = slice(dims.dp_rank, None, dims.degrees.dp)
    own = {
        of.name: value[mine]
        for of in fields(batch)
        if isinstance(value := getattr(batch, of.name), torch.Tensor)
    }
    if extra:
        own |= {"positions": None, "extra": {name: value[mine] for name, value in extra.items()}}  # type: ignore[dict-item]
    results = [stepper.train_step([replace(batch, **own)]) for _ in range(_STEPS)]
    losses = [result.loss.item() for result in results]
    norm = results[0].grad_norm.item()
    return Trained(losses, gradients, model, plan, batch, norm, kind)


def their_steps(case, batch):
    """Take the same steps on transformers' model in one process, each document alone."""
    model = case.cls.from_pretrained(case.saved, dtype=torch.float32).train()
    # loading forgets what the constructor froze (Idefics)
    for name, param in case.model.named_parameters():
        model.get_parameter(name).requires_grad_(param.requires_grad)
    optimizer = torch.optim.AdamW(model.parameters(), _LR, (0.9, 0.95), _EPS, 0.0)
    documents = torch.zeros_like(batch.tokens) if batch.document_ids is None else batch.document_ids
    losses = []
    gradients = {}
    for _ in range(_STEPS):
        loss = torch.zeros(())
        for row, (tokens, labels, ids) in enumerate(
            zip(batch.tokens, batch.labels, documents, strict=True)
        ):
            extra = {name: value[row : row + 1] for name, value in batch.inputs.items()}
            for number in range(int(ids.max()) + 1):
                mine = ids == number
                inputs = extra | {"input_ids": tokens[mine].unsqueeze(0)}
                logits = model(**inputs, use_cache=False, return_dict=True).logits[0]
                loss = loss + F.cross_entropy(
                    logits.float(), labels[mine], ignore_index=IGNORE_INDEX, reduction="sum"
                )
        loss = loss / (batch.labels != IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    return Trained(losses, gradients)


def trains(case):
    """Make two optimizer steps, and compare losses and gradients with transformers' own, each
    document alone.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = our_steps(case.config, case.saved, Degrees())
    expected = their_steps(case, found.batch)
    case.notes["trained"] = found
    if difference := found.difference(expected):
        return f"WRONG: {difference}"
    return found.kind


def exports(case):
    """Save the trained model; transformers reads every parameter bit for bit, and the folder has
    the same keys.
    """
    if "trained" not in case.notes:
        return "-"
    return save_and_compare(case, case.notes.pop("trained"), case.folder / "trained")


def save_and_compare(case, trained, folder):
    """Save the trained model into `folder`; the first rank reads it with transformers.
    Collective.
    """
    save_hf_model(trained.model, trained.plan, None, folder, torch.float32, case.saved)
    own = {clean_name(name): whole(param) for name, param in trained.model.named_parameters()}
    if dist.get_rank() > 0:
        return ""
    loaded, info = case.cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if any(info.values()):
        return f"WRONG: {next(f'{name} {value}' for name, value in info.items() if value)}"
    read = dict(loaded.named_parameters(remove_duplicate=False))
    differing = [
        name for name, tensor in own.items() if name not in read or not is_same(read[name], tensor)
    ]
    if differing:
        return f"WRONG: {len(differing)} parameters, among them {differing[0]}"
    began = dict(case.cls.from_pretrained(case.saved, dtype=torch.float32).named_parameters())
    if all(torch.equal(own[name], tensor) for name, tensor in began.items()):
        return "WRONG: nothing was trained"
    keys = [read_model_headers(place).keys() for place in (folder, case.saved)]
    return "equal" if keys[0] == keys[1] else f"other keys: {sorted(keys[0] ^ keys[1])[:3]}"


def generates(case):
    """Compare greedy continuations of two prompts in a batch with transformers' `generate`, with
    and without a cache.

    If they differ, the token must be a tie of logits without a cache.
    """
    prompts = [list(range(3, 9)), list(range(40, 44))]
    ours = case.ours
    found = generate(ours, prompts, max_new_tokens=6, device=_CPU)
    kept = ours.can_cache(_CPU)
    known = "no generate of transformers"
    for prompt, continuation in zip(prompts, found, strict=True):
        theirs = [their_continuation(case.model, prompt, use_cache) for use_cache in (False, True)]
        if None not in theirs:
            known = "transformers' cache gives others" if theirs[0] != theirs[1] else ""
        if continuation.tokens in theirs and theirs[0] == theirs[1]:
            continue
        row = list(prompt)
        with torch.no_grad():
            for token in continuation.tokens:
                logits = case.model(
                    input_ids=torch.tensor([row]), use_cache=False, return_dict=True
                ).logits[0, -1]
                if logits[token] < logits.max() - 1e-4 * logits.abs().max():  # not a tie
                    return f"WRONG: {continuation.tokens}, of transformers {theirs}"
                if token == getattr(case.model.config, "pad_token_id", None):
                    break  # some classes treat it as padding when they read it
                row.append(token)
    return ("cached" if kept else "whole") + (f" ({known})" if known else "")


def their_continuation(model, prompt, use_cache):
    """Return six tokens of transformers' own greedy `generate`; None if it raises."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=6, do_sample=False, use_cache=use_cache, pad_token_id=0
    )
    own, model.generation_config = getattr(model, "generation_config", None), config
    try:
        with torch.no_grad():
            row = model.generate(
                torch.tensor([prompt]), generation_config=config, attention_mask=None
            )[0].tolist()
    except Exception:  # noqa: BLE001 - of transformers, all kinds of them
        return None
    finally:
        model.generation_config = own
    return row[len(prompt) :] if row[: len(prompt)] == prompt else row[-6:]
