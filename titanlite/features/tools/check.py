"""`python -m titanlite check --config FILE --world-size N`: what would be trained, or every error in it."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from titanlite.assemble import build_unsharded, resolve_start
from titanlite.base.errors import DataError, raise_problems
from titanlite.base.text import command, format_count
from titanlite.checkpoint.train_state import Progress
from titanlite.config import JobConfig, TransformersConfig
from titanlite.config.assets import base_model_of
from titanlite.config.data import DataSection, get_sources
from titanlite.config.defaults import wants_held_out
from titanlite.config.parallelism import BATCHES, resolve_global_batch_size
from titanlite.data.corpus import build_corpus, describe_left_out
from titanlite.data.dataset import get_num_held_out
from titanlite.data.loader import check_form, get_kind, resolve_tokenizer_path
from titanlite.features.dpo import build_dpo
from titanlite.features.sft.build import load_example_tokenizer
from titanlite.features.sft.dataset import pack_best_fit
from titanlite.features.sft.examples import encode_rows, make_encoder
from titanlite.features.sft.forms import COLUMNS, FORM_FIELDS
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import Rows, describe_place, merge_row_problems, open_rows
from titanlite.optim.optimizer import count_parameters, lr_multipliers
from titanlite.preflight import Checked, check_arguments

_ROWS = 64  # of each source
_MANY = 32 * max(size for size, _, _ in BATCHES.values())  # rows of which a 32nd is a batch
_Counts = tuple[float, int | None]


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print what would be trained; exit code 2 after one clear error. Downloads descriptions of models, no weights."""
    checked = check_arguments(argv, weights=False)
    (job, start), counts = resolve_start(checked.job), list[_Counts]()
    lines = [*_describe_model(checked), *_describe_rows(job, counts), *_format(checked, counts, start)]
    print("\n".join([f"OK on {format_count(checked.degrees.world_size, 'rank')}: {checked.degrees}", *lines]))


def _describe_model(checked: Checked) -> Iterator[str]:
    job, config, degrees = checked.job, checked.model_config, checked.degrees
    base = base_model_of(path := job.checkpoint.initial_load_path)
    weights = f"weights of {base.name if base.on_hub else path}" if base else "random weights"
    family = f"{config.family} ({config.architecture})" if isinstance(config, TransformersConfig) else config.family
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_unsharded(job, config, device)
    lr_multipliers(model, job.optimizer)
    total, trained = count_parameters(model)
    some = "" if trained == total else f", {trained / 1e6:,.3f} M of them trained"
    adapters = f", adapters of rank {job.lora.rank}" if job.lora.rank else ""
    yield f"  model      {family}, {total / 1e6:,.1f} M parameters{some}, {weights}{adapters}"
    copies = 3 - (job.optimizer.name == "Muon")  # of what is trained: gradients and moments
    nbytes = sum(param.nbytes * (1 + copies * param.requires_grad) for param in model.parameters())
    gib = nbytes / (degrees.world_size // degrees.dp_replicate) / 2**30
    room = torch.cuda.get_device_properties(0).total_memory / 2**30 if device == "cuda" else None
    verdict = "" if room is None else f": {'fits' if gib < room else 'DOES NOT FIT'} in {room:.0f} GiB"
    size = f"{gib:,.1f} GiB" if gib >= 1 else f"{gib * 2**10:,.1f} MiB"
    yield f"  memory     about {size} a rank for weights, gradients and optimizer states{verdict}; more for activations"


def _describe_rows(job: JobConfig, counts: list[_Counts]) -> Iterator[str]:
    """Yield lines about each source and its first rows, if they can be used; add its `_count_sequences` to `counts`."""
    get_kind(job.data)
    data = resolve_tokenizer_path(job)
    tokenizer = None
    for name, source in get_sources(data).items():
        where = f"{name}: " if name else ""
        if source.dataset != "examples" or not Path(source.path).expanduser().exists():
            what = {"stdlib": "Python files of the standard library", "examples": f"{source.path}, on the hub"}
            if source.dataset == "text":
                files = build_corpus(source).files
                left_out = describe_left_out(source, [path for _, path in files])
                what["text"] = f"{source.path}, text, {format_count(len(files), 'file')}{left_out}"
            yield f"  data       {where}{what.get(source.dataset, f'{source.path}, {source.dataset}')}"
            continue
        tokenizer = load_example_tokenizer(data) if tokenizer is None else tokenizer
        rows = open_rows(source)
        batch = list(islice(rows, _ROWS))
        encoder = make_encoder(source, tokenizer, batch)
        problems, lengths = [], []
        first, have = ("first row", "has") if len(batch) == 1 else (f"first {len(batch)} rows", "have")
        for row, found in encode_rows(encoder, batch):
            if isinstance(found, RowError):
                problems.append(f"{describe_place(rows.names, row.file, row.number)}: {found}")
            else:
                lengths += [sum(len(document.ids) for document in example) for example in found]
        if source.bad_rows == "error" or not lengths:
            raise_problems(DataError, "data", merge_row_problems(problems))
        assert encoder is not None
        check_form(job, encoder.form)
        build_dpo(job, encoder.form)
        if source.too_long == "error" and max(lengths) > job.training.seq_len:
            raise DataError(
                f"data: an example of the {first} of {source.path} has {max(lengths)} tokens, but "
                f'training.seq_len is {job.training.seq_len}. Raise it, or set data.too_long to "cut" or "drop".'
            )
        counts.append(_count_sequences(job, source, rows, len(batch), lengths))
        columns = {column for row in batch if isinstance(row.content, dict) for column in row.content}
        unused = ", ".join(sorted(columns - {*FORM_FIELDS[encoder.form], *(COLUMNS if encoder.form != "text" else ())}))
        yield (
            f"  data       {where}{source.path}, form {encoder.form}; its {first} {have} {mean(lengths):.0f} tokens in "
            + f"the mean, {max(lengths)} at most{unused and f'; columns not used: {unused}'}"
            + describe_left_out(source, rows.names)
        )
        if wants_held_out(job) and not (source.validation_path or source.validation_share == 0 or source.streaming):
            yield f"  held out   {where}rows of these files (data.validation_share); data.validation_path names others"


def _count_sequences(job: JobConfig, source: DataSection, rows: Rows, num_rows: int, lengths: list[int]) -> _Counts:
    """Return the examples of a sequence and the sequences of an epoch (None: many), as the first rows tell them."""
    total, seq_len = sum(1 for _ in islice(rows, _MANY)), job.training.seq_len
    if source.too_long == "split":
        lengths = [min(seq_len, length - start) for length in lengths for start in range(0, length, seq_len)]
    fitting = np.tile(np.minimum(lengths, seq_len), 1 if num_rows == total else 32)  # of many, few are half full
    examples = len(fitting) / len(pack_best_fit(fitting, seq_len)) if source.packing else 1.0
    train = total - (0 if source.validation_path else get_num_held_out(total, source.validation_share))
    return examples, None if total == _MANY or source.streaming else round(train * len(lengths) / num_rows / examples)


def _format(checked: Checked, counts: Sequence[_Counts], start: Progress | None) -> list[str]:
    job, degrees, training, optimizer = checked.job, checked.degrees, checked.job.training, checked.job.optimizer
    known = counts if len(counts) == 1 == len(get_sources(job.data)) else []
    examples, num_sequences = known[0] if known else (1.0, None)
    batch = resolve_global_batch_size(job, degrees.dp, examples, num_sequences, start and start.batch_size)
    warmup = job.lr_scheduler.warmup_steps
    warm = f"of {format_count(warmup, 'step')}" if warmup >= 0 else "3% of the steps, at most 200"
    warm += ", which is the whole run" if not training.epochs and warmup >= training.steps > 0 else ""
    guide = "guide, {} {} ({}), at most 1/32 of the data".format(*BATCHES[training.objective == "dpo"])
    chosen = "" if training.global_batch_size else f"; from: {f'the run in {job.job.dump_folder}' if start else guide}"
    about = "" if not chosen or start else "about " if known else "at most "
    tokens = f"{about}{training.steps * batch * training.seq_len:,} tokens with padding"
    length = f"{format_count(training.steps, 'step')}, {tokens}"
    length = format_count(training.epochs, "epoch") if training.epochs else length
    limit = ", the model's limit" if training.seq_len == checked.model_config.max_position_embeddings else ""
    return [
        f"  training   {training.objective}, {length}",
        f"  batch      {about}{format_count(batch, 'sequence')} of {training.seq_len:,} tokens{limit}{chosen}",
        f"  optimizer  {optimizer.name}, lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, beta2 "
        f"{optimizer.beta2:g}, warm-up {warm}",
        f"  folder     {job.job.dump_folder}",
        "Not looked at: the other rows (`titanlite data`), activations and time (`titanlite plan`), weights.",
    ]
