"""From configuration to tokenizer and batches."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titanlite.base.errors import DataError
from titanlite.base.files import read_regular
from titanlite.base.log import logger
from titanlite.config.data import DataSection, get_sources
from titanlite.config.parallelism import resolve_global_batch_size
from titanlite.config.patterns import parse_object
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import build_corpus
from titanlite.data.dataset import PackedDataset, SequenceDataset, TrainDataset
from titanlite.data.loader import TrainLoader
from titanlite.data.tokenizer import build_tokenizer, load_tokenizer
from titanlite.data.tokens import build_tokens
from titanlite.features.streams.mixture import MixtureDataset, get_source_seed, naming_source
from titanlite.models.families import get_model_type

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from titanlite.features.sft.dataset import ExampleDataset, ExampleSet


_MOST_TEMPLATE_BYTES = 16 << 20


def build_data(job: JobConfig, dp_rank: int, dp_degree: int) -> tuple["PreTrainedTokenizerFast", TrainLoader]:
    """The tokenizer and the batches of one data-parallel rank; every process may call it at any time.

    No collectives: processes of one machine share the work through the cache folder. The vocabulary that the model
    must have at least is `loader.dataset.vocab_size`. `training.global_batch_size` = -1 means
    `local_batch_size * dp_degree`. With `data.tokenizer_path` empty, a tokenizer.json in `model.hf_assets_path` is
    used before a BPE is trained. `loader.dataset` is an `ExampleDataset` for `data.dataset` = 'examples' (with
    `data.streaming` a `StreamDataset`), an `ImageDataset` for 'images', else a `PackedDataset`; a `MixtureDataset` of
    these where there are `data.sources`.

    Raises:
        DataError: the text, a row or the tokenizer is missing or unusable, or there is too little for `seq_len`.
        ConfigError: the batch sizes and `dp_degree` do not fit each other.
    """
    training = job.training
    if job.data.dataset == "images":
        tokenizer, dataset = _build_images(job)
    else:
        data = resolve_tokenizer_path(job)
        if data.sources:
            tokenizer, dataset = _build_mixture(data, training.seq_len, training.seed)
        else:
            own = _load_own_tokenizer(job) if not data.tokenizer_path and data.dataset != "examples" else None
            model_type = get_model_type(job.model)
            tokenizer, dataset = _build_source(data, training.seq_len, training.seed, "data", own, model_type)
    loader = TrainLoader(
        dataset,
        seed=training.seed,
        global_batch_size=resolve_global_batch_size(training, dp_degree),
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
    if loader.mixture:
        logger.info("data: %s", loader.mixture)
    if job.validation.enable:
        loader.log_validation_size(job.validation.steps, job.validation.freq)
    return tokenizer, loader


def _build_source(
    data: DataSection,
    seq_len: int,
    seed: int,
    where: str = "data",
    tokenizer: "PreTrainedTokenizerFast | None" = None,
    model_type: str = "",
) -> tuple["PreTrainedTokenizerFast", SequenceDataset]:
    """The tokenizer and the sequences of what `data.path` names; `where` is the section, for the log."""
    if data.dataset != "examples":
        return _build_packed(data, seq_len, where, tokenizer, model_type)
    if data.streaming:
        return _build_stream(data, seq_len, seed, where, tokenizer)
    return build_example_dataset(data, seq_len, where, tokenizer)


def _build_mixture(data: DataSection, seq_len: int, seed: int) -> tuple["PreTrainedTokenizerFast", TrainDataset]:
    if not data.tokenizer_path:  # one that is trained would know the first source only
        raise DataError(
            "data: data.sources need a tokenizer, but data.tokenizer_path is empty and model.hf_assets_path has no "
            "tokenizer.json. Set one of them to its folder."
        )
    tokenizer = load_tokenizer(data.tokenizer_path) if data.dataset == "text" else _load_example_tokenizer(data)
    parts = {}
    for name, source in get_sources(data).items():
        with naming_source(name):
            where = f"data.sources.{name}"
            _, parts[name] = _build_source(source, seq_len, get_source_seed(seed, name), where, tokenizer)
    weights = {name: source.weight for name, source in data.sources.items() if source.weight is not None}
    return tokenizer, MixtureDataset(parts, weights or None)


def resolve_tokenizer_path(job: JobConfig) -> DataSection:
    """`job.data`, with the tokenizer of `model.hf_assets_path` where no other is configured."""
    data = job.data
    assets = Path(job.model.hf_assets_path).expanduser()
    if job.model.hf_assets_path and not data.tokenizer_path and (assets / "tokenizer.json").is_file():
        # Pretrained weights mean nothing with the ids of another tokenizer.
        data = replace(data, tokenizer_path=str(assets))
        logger.info("data: using the tokenizer of model.hf_assets_path, %s", assets)
    return data


def _load_own_tokenizer(job: JobConfig) -> "PreTrainedTokenizerFast | None":
    """The BPE that this run was begun with, from the checkpoint that it goes on with; None: it begins.

    Another version of titanlite or of transformers would train another one.
    """
    section = job.checkpoint
    if not section.enable or section.load_step == 0:
        return None
    folder = Path(job.job.dump_folder) / section.folder
    steps = {path.parent: path.parent.name.removeprefix("step-") for path in folder.glob("step-*/tokenizer.json")}
    found = {int(step): path for path, step in steps.items() if step.isdecimal()}  # others were set aside
    wanted = sorted(found, reverse=True) if section.load_step < 0 else [section.load_step]
    for step in wanted:
        if step in found:
            try:
                tokenizer = load_tokenizer(found[step] / "tokenizer.json")
            except DataError as error:  # the checkpoint is damaged, and the run goes on with one before
                logger.warning("%s", error)
                continue
            logger.info("data: the tokenizer is that of the checkpoint %s", found[step])
            return tokenizer
    return None


def _build_packed(
    data: DataSection, seq_len: int, where: str, tokenizer: "PreTrainedTokenizerFast | None", model_type: str
) -> tuple["PreTrainedTokenizerFast", SequenceDataset]:
    corpus = build_corpus(data)
    tokenizer = build_tokenizer(data, corpus, model_type) if tokenizer is None else tokenizer
    dataset = PackedDataset(build_tokens(data, corpus, tokenizer), seq_len, data.validation_share)
    logger.info(
        "%s: %d tokens, vocabulary %d, in %d documents; sequences of %d tokens: %d to train on, %d held out",
        *(where, len(dataset.tokenized.tokens), dataset.tokenized.vocab_size, dataset.tokenized.num_documents),
        *(dataset.seq_len, dataset.num_train_sequences, dataset.num_validation_sequences),
    )
    return tokenizer, dataset


def build_example_dataset(
    data: DataSection, seq_len: int, where: str = "data", tokenizer: "PreTrainedTokenizerFast | None" = None
) -> tuple["PreTrainedTokenizerFast", "ExampleDataset"]:
    """The tokenizer, with `data.chat_template` if that is set, and the examples of `data.path`, ready for batches.

    `where` is the section that they are from, for the log. The tokenizer is loaded unless it is given.

    Raises:
        DataError: there is no tokenizer or template, a row is bad, or an example too long, and the settings say so.
    """
    # Imported here because the text pipeline needs no jinja2 and no transformers.
    from titanlite.features.sft.dataset import ExampleDataset, fit_examples, hold_out
    from titanlite.features.sft.examples import build_examples
    from titanlite.features.sft.report import describe, get_warnings
    from titanlite.features.sft.rows import build_rows

    tokenizer = _load_example_tokenizer(data) if tokenizer is None else tokenizer
    rows = build_rows(data.path, data.pattern, data.subset, data.split)
    examples = build_examples(data, rows, tokenizer)
    train = fit_examples(examples, seq_len, data.too_long)
    if data.validation_path:
        held_out = _build_held_out(replace(data, format=examples.header.form), seq_len, tokenizer)
        sources = (train, held_out)
    else:
        sources = (train,)
        train, held_out = hold_out(train, data.validation_share)
    dataset = ExampleDataset(train, held_out, sources, seq_len, _get_padding(tokenizer), packing=data.packing)
    logger.info("%s: %s", where, describe(dataset))
    for warning in get_warnings(dataset):
        logger.warning("%s: %s", where, warning)
    return tokenizer, dataset


def _build_stream(
    data: DataSection, seq_len: int, seed: int, where: str, tokenizer: "PreTrainedTokenizerFast | None"
) -> tuple["PreTrainedTokenizerFast", SequenceDataset]:
    from titanlite.features.sft.rows import build_rows
    from titanlite.features.streams.stream import StreamDataset

    tokenizer = _load_example_tokenizer(data) if tokenizer is None else tokenizer
    rows = build_rows(data.path, data.pattern, data.subset, data.split, streaming=True)
    held_out = _build_held_out(data, seq_len, tokenizer) if data.validation_path else None
    dataset = StreamDataset(data, rows, tokenizer, held_out, seq_len, _get_padding(tokenizer), seed)
    logger.info("%s: %s; %d held out", where, dataset.fingerprint, dataset.num_validation_sequences)
    return tokenizer, dataset


def _build_held_out(data: DataSection, seq_len: int, tokenizer: "PreTrainedTokenizerFast") -> "ExampleSet":
    from titanlite.features.sft.dataset import fit_examples
    from titanlite.features.sft.examples import build_examples
    from titanlite.features.sft.rows import build_rows

    rows = build_rows(data.validation_path, data.pattern, data.subset, data.validation_split)
    return fit_examples(build_examples(data, rows, tokenizer), seq_len, data.too_long)


def _load_example_tokenizer(data: DataSection) -> "PreTrainedTokenizerFast":
    """The tokenizer with its chat template."""
    if not data.tokenizer_path:
        raise DataError(
            'data: dataset = "examples" needs a tokenizer, but data.tokenizer_path is empty and model.hf_assets_path '
            "has no tokenizer.json. Set one of them to the folder of the model to fine-tune."
        )
    from titanlite.features.sft.chat_template import set_arguments

    tokenizer = load_tokenizer(data.tokenizer_path)
    if data.chat_template:
        tokenizer.chat_template = _read_template(data.chat_template)
    if arguments := parse_object("data.chat_template_kwargs", data.chat_template_kwargs):
        if not tokenizer.chat_template:
            raise DataError("data.chat_template_kwargs: the tokenizer has no chat template. Set data.chat_template.")
        tokenizer.chat_template = set_arguments(tokenizer.chat_template, arguments)
    return tokenizer


def _get_padding(tokenizer: "PreTrainedTokenizerFast") -> int:
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return cast(int, padding)


def _read_template(path: str) -> str:
    try:
        return read_regular(Path(path).expanduser(), _MOST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template: cannot read {path}: {error}. Set it to a Jinja file in UTF-8.") from None


def _build_images(job: JobConfig) -> tuple["PreTrainedTokenizerFast", SequenceDataset]:
    from titanlite.features.images.rows import ImageDataset, load_processor, read_image_rows

    processor = load_processor(job.data.tokenizer_path or job.model.hf_assets_path)
    rows = read_image_rows(Path(job.data.path).expanduser())
    data = job.data
    dataset = ImageDataset(rows, processor, job.training.seq_len, data.validation_share, date=data.chat_date)
    logger.info("data: %s", dataset.fingerprint)
    return processor.tokenizer, cast(SequenceDataset, dataset)  # its batches have the fields of a Batch, and inputs
