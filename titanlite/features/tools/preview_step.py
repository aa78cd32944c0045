"""`python -m titanlite data --config FILE --step N`: the documents that one step of a run trained on.

Batches follow from the seed and the number of samples before them, so nothing of the run is needed but that number. It
is in its checkpoints, for a run may have been resumed with another batch size, or with data left out.
"""

from dataclasses import dataclass
from pathlib import Path

from titanlite.base.errors import CheckpointError, ConfigError, DataError
from titanlite.base.log import raw_output
from titanlite.base.tables import format_count
from titanlite.checkpoint import Progress, find_progress
from titanlite.config import JobConfig
from titanlite.data.build import build_data
from titanlite.data.loader import TrainLoader
from titanlite.data.order import Stretch, find_stretch
from titanlite.features.streams.mixture import MixtureDataset, get_sources
from titanlite.features.streams.stream import StreamDataset
from titanlite.features.tools.shown import Painter, get_shown_documents
from titanlite.preflight import check
from titanlite.run_setup import with_chat_date

_Chosen = list[tuple[int, str]]
_PLAIN_ORDER = "--checkpoint.load_step=0 shows the plain order of this configuration."


@dataclass(frozen=True)
class StepRequest:
    """What to show.

    Attributes:
        step: of training; 1 is the first, as on the console.
        rank: only what this data-parallel rank trained on.
        num_shown: documents that are printed with their text.
        max_tokens: of each text; 0: all.
        color: mark trained tokens by colour.
    """

    step: int
    rank: int | None = None
    num_shown: int = 3
    max_tokens: int = 0
    color: bool = False


@dataclass(frozen=True)
class _Run:
    """A run that was found in its folder, as its newest checkpoint, or that of `checkpoint.load_step`, has it."""

    folder: Path
    progress: Progress


def show_step(job: JobConfig, world_size: int | None, request: StepRequest) -> None:
    """Print the documents of every sequence of a step, as the run in `job.dump_folder` trained on them.

    Without `world_size`, it is that of the run's checkpoint, or 1.

    Raises:
        ConfigError: there is no such step or rank; what `check` and `build_data` raise.
        CheckpointError: the checkpoint cannot be read, or does not know what the step trained on.
        DataError: that was other data than what `job` has; a row of a stream cannot be used.
    """
    run = _find_run(job)
    _check_step(job, run, request)
    if world_size is None:
        world_size = 1 if run is None else run.progress.world_size
    checked = check(job, world_size, weights=False)
    dp = checked.degrees.dp
    if request.rank is not None and not 0 <= request.rank < dp:
        raise ConfigError(
            f"data: --rank {request.rank} is none of the {format_count(dp, 'data-parallel rank')} of a world size of "
            f"{checked.degrees.world_size}. Give 0 to {dp - 1}, or another --world-size."
        )
    tokenizer, loader = build_data(with_chat_date(checked.job), 0, dp)
    if run is not None:
        progress = run.progress
        loader.start_from(progress.step, progress.samples, job.data.skip_to_sample, progress.stretches, progress.taken)
    else:
        loader.start_from(0, 0, job.data.skip_to_sample)
    stretch = _find_stretch(run, loader, request)
    if isinstance(loader.dataset, MixtureDataset):
        loader.dataset.offsets = dict(stretch.offsets)
    chosen = _choose(loader, request, stretch)
    _show_where(job, loader, run, request, stretch)
    show = Painter(tokenizer, color=request.color, max_tokens=request.max_tokens)
    _show_sequences(loader, request, stretch, chosen, show)


def _find_run(job: JobConfig) -> _Run | None:
    folder = Path(job.job.dump_folder)
    if not job.checkpoint.enable:
        return None
    found = find_progress(folder / job.checkpoint.folder, job.checkpoint.load_step)
    return None if found is None else _Run(folder, found)


def _check_step(job: JobConfig, run: _Run | None, request: StepRequest) -> None:
    last = max(job.training.steps, 0 if run is None else run.progress.step)
    if request.step < 1 or (request.step > last and not job.training.epochs):  # how many these are, the data say
        raise ConfigError(
            f"data: --step {request.step} is not in [1, {last}], the steps of this run (training.steps). Give one as "
            "the console counts them, or raise training.steps."
        )


def _find_stretch(run: _Run | None, loader: TrainLoader, request: StepRequest) -> Stretch:
    """What the step belongs to; of the data that `loader` has."""
    stretches = loader.stretches
    stretch = find_stretch(stretches, request.step - 1)
    if stretch is None:
        assert run is not None
        raise CheckpointError(
            f"data: the checkpoints of {run.folder} were begun by an older version, and do not say what the steps up "
            f"to {stretches[0].step} trained on. {_PLAIN_ORDER}"
        )
    if stretch.data != loader.fingerprint:
        raise DataError(
            f"data: step {request.step} trained on {stretch.data}, but this configuration has {loader.fingerprint}. "
            f"Give the settings and files of that time. {_PLAIN_ORDER}"
        )
    return stretch


def _choose(loader: TrainLoader, request: StepRequest, stretch: Stretch) -> _Chosen:
    """The sequences to show, as numbers in the global batch, each with the rank that took it, if that is known.

    Raises:
        ConfigError: one rank was asked for, but then the step was not for ranks like these.
    """
    size, at_once = stretch.global_batch_size, loader.dp_degree * loader.local_batch_size
    if size % at_once:
        if request.rank is None:
            return [(number, "") for number in range(size)]
        raise ConfigError(
            f"data: step {request.step} had {size} sequences, which {loader.dp_degree} data-parallel ranks of "
            f"training.local_batch_size ({loader.local_batch_size}) cannot share. Leave --rank out, or give the "
            "settings and --world-size of that time."
        )
    places = [(number, *loader.locate(number)) for number in range(size)]
    return [
        (number, f" (data rank {rank}, micro-batch {micro_batch})")
        for number, rank, micro_batch in places
        if request.rank in (None, rank)
    ]


def _show_where(job: JobConfig, loader: TrainLoader, run: _Run | None, request: StepRequest, stretch: Stretch) -> None:
    """Print which part of the data order the step is, and how that is known."""
    step, first, size = request.step, stretch.samples_before(request.step - 1), stretch.global_batch_size
    print(f"step {step}")
    if run is None:
        asked = job.checkpoint.enable and job.checkpoint.load_step
        why = f"{job.job.dump_folder} has no checkpoint" if asked else "no checkpoint is asked for"
        print(f"  as run     from its beginning, in the plain order: {why}")
    else:
        print(f"  as run     {run.folder} at step {run.progress.step}")
    print(f"  order      {stretch.data}")
    ranks = format_count(loader.dp_degree, "data rank")
    print(f"  sequences  {first + 1:,} to {first + size:,} of that order, on {ranks}")
    last = None if run is None else find_stretch(loader.stretches, run.progress.step - 1)
    if last is not None and run is not None and step > run.progress.step:
        if last.global_batch_size != size:
            print(f"  note       up to step {run.progress.step} the run took {last.global_batch_size} at a time")
        if last.data != stretch.data:
            print(f"  note       up to step {run.progress.step} the run had {last.data}")
    if any(isinstance(source.dataset, StreamDataset) for source in get_sources(loader.dataset)):
        print("  note       the stream is read up to there, which may take long", flush=True)


def _show_sequences(
    loader: TrainLoader, request: StepRequest, stretch: Stretch, chosen: _Chosen, show: Painter
) -> None:
    num_documents = 0
    for number, where in chosen:
        sample = stretch.samples_before(request.step - 1) + number
        (index,) = loader.dataset.get_train_indices(loader.seed, sample, sample + 1).tolist()
        documents = get_shown_documents(loader.dataset, index)
        print(
            f"\nsequence {number + 1} of {stretch.global_batch_size}{where}: "
            f"{format_count(len(documents), 'document')}, {sum(document.num_tokens for document in documents)} of "
            f"{loader.dataset.seq_len} tokens, {sum(document.num_trained for document in documents)} trained"
        )
        for place, document in enumerate(documents, 1):
            side = f" ({document.side})" if document.side else ""
            counts = f"{document.num_tokens} tokens, {document.num_trained} trained"
            print(f"  document {place}{side}: {document.place}, {counts}")
            num_documents += 1
            if num_documents <= request.num_shown:
                print(show(document.ids, document.trained), file=raw_output())
    left_out = num_documents - max(request.num_shown, 0)
    if left_out > 0:
        print(f"\nwithout the text of {format_count(left_out, 'document')}: --samples {num_documents} shows all")
