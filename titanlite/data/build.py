"""From configuration to tokenizer and batches."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titanlite.config.parallelism import resolve_global_batch_size
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import build_corpus
from titanlite.data.dataset import PackedDataset, SequenceDataset
from titanlite.data.loader import TrainLoader
from titanlite.data.tokenizer import build_tokenizer
from titanlite.data.tokens import build_tokens
from titanlite.logger import logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def build_data(job: JobConfig, dp_rank: int, dp_degree: int) -> tuple["PreTrainedTokenizerFast", TrainLoader]:
    """The tokenizer and the batches of one data-parallel rank; every process may call it at any time.

    No collectives: processes of one machine share the work through the cache folder. The vocabulary that the model
    must have at least is `loader.dataset.tokenized.vocab_size`. `training.global_batch_size` = -1 means
    `local_batch_size * dp_degree`. With `data.tokenizer_path` empty, a tokenizer.json in `model.hf_assets_path` is
    used before a BPE is trained.

    Raises:
        DataError: the text or the tokenizer is missing or unusable, or there is too little text for `seq_len`.
        ConfigError: the batch sizes and `dp_degree` do not fit each other.
    """
    if job.data.dataset == "images":
        return _build_images(job, dp_rank, dp_degree)
    data, training = job.data, job.training
    assets = Path(job.model.hf_assets_path).expanduser()
    if job.model.hf_assets_path and not data.tokenizer_path and (assets / "tokenizer.json").is_file():
        # Pretrained weights mean nothing with the ids of another tokenizer.
        data = replace(data, tokenizer_path=str(assets))
        logger.info("data: using the tokenizer of model.hf_assets_path, %s", assets)
    corpus = build_corpus(data)
    tokenizer = build_tokenizer(data, corpus)
    dataset = PackedDataset(build_tokens(data, corpus, tokenizer), training.seq_len)
    global_batch_size = resolve_global_batch_size(training, dp_degree)
    loader = TrainLoader(
        dataset,
        seed=training.seed,
        global_batch_size=global_batch_size,
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
    logger.info(
        "data: %d tokens, vocabulary %d, in %d documents; sequences of %d tokens: %d to train on, %d held out",
        *(len(dataset.tokenized.tokens), dataset.tokenized.vocab_size, dataset.tokenized.num_documents),
        *(dataset.seq_len, dataset.num_train_sequences, dataset.num_validation_sequences),
    )
    if job.validation.enable and loader.num_validation_steps(job.validation.steps) < job.validation.steps:
        logger.info(
            "data: %d held-out sequences fill %d of validation.steps = %d batches of %d",
            *(dataset.num_validation_sequences, loader.num_validation_steps(job.validation.steps)),
            *(job.validation.steps, global_batch_size),
        )
    return tokenizer, loader


def _build_images(job: JobConfig, dp_rank: int, dp_degree: int) -> tuple["PreTrainedTokenizerFast", TrainLoader]:
    from titanlite.data.images import ImageDataset, load_processor, read_image_rows

    training = job.training
    processor = load_processor(job.data.tokenizer_path or job.model.hf_assets_path)
    rows = read_image_rows(Path(job.data.path).expanduser())
    dataset = ImageDataset(rows, processor, training.seq_len)
    loader = TrainLoader(
        cast(SequenceDataset, dataset),  # its batches have the fields of a Batch, and inputs
        seed=training.seed,
        global_batch_size=resolve_global_batch_size(training, dp_degree),
        local_batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
    logger.info("data: %s", dataset.fingerprint)
    return processor.tokenizer, loader
