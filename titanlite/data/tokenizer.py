"""Tokenizers: loaded from a local folder, or a byte-level BPE that is trained on the corpus when it
is first needed.

transformers rebuilds the tokenizers of some models with the normalization and splitting of the
model's class, whatever tokenizer.json says. A BPE is therefore trained with the normalization and
splitting of that class.

TOKENIZERS_PARALLELISM is deliberately not set: with true, a process that is forked after the
library's thread pool has started would hang (seen with tokenizers 0.23); with false, the first use
is up to twice as slow on 2 cores.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titanlite.base.errors import ConfigError, DataError
from titanlite.base.files import read_json, render, replace_file
from titanlite.base.hf_objects import load_from_folder, load_tokenizer_file
from titanlite.base.log import logger, warn_once
from titanlite.base.text import describe_error
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.config.assets import weights_key
from titanlite.config.data import DataSection
from titanlite.data.corpus import Corpus, get_cache_folder, load_or_build, split_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as HFTokenizer
else:
    HFTokenizer = Any  # importing transformers takes 0.5 to 1 s

END_OF_TEXT = "<|endoftext|>"
# 12 MB train in 1.5 to 2.5 s on 2 cores, so this limit takes about 5 s.
_MAX_TRAINING_BYTES = 24 * 2**20
_TRAINING_PIECE_CHARS = 64 * 2**10
# Names of the end-of-text token in tokenizer.json files without a tokenizer_config.json.
_KNOWN_END_OF_TEXT = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
)
# Increase this number when the training below changes; otherwise old cached tokenizers are used.
_RECIPE_VERSION = 2
# Keys that transformers 5 adds to tokenizer_config.json: how it loaded the tokenizer, which is true
# only on that machine, and its new name of the table `extra_special_tokens`, which transformers 4
# ignores.
_NOT_WRITTEN = (
    "is_local",
    "local_files_only",
    "name_or_path",
    "trust_remote_code",
    "backend",
    "model_specific_special_tokens",
)


@lru_cache(maxsize=2)
def serialize(tokenizer: HFTokenizer) -> str:
    """Return the tokenizer's tokenizer.json as a string. Cached, because it takes a third of a
    second for 150 k tokens, and never changes.
    """
    return tokenizer.backend_tokenizer.to_str()


def count_ids(tokenizer: HFTokenizer) -> int:
    """Return one more than the largest token id; `len(tokenizer)` is less if ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def get_prefix(tokenizer: HFTokenizer) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer puts in front of any text."""
    text = "a"
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    full = tokenizer(text)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def build_end_reader(
    tokenizer: HFTokenizer,
) -> Callable[[str], tuple[tuple[int, ...], str]]:
    """Return a function that takes the text of a document. It returns the token ids to put in front
    of the text, and the text without the begin token and the end token that it may start and end
    with.

    The ids are those that the tokenizer puts in front of any text; a begin token that the text
    starts with is added if it is not among them.
    """
    prefix = get_prefix(tokenizer)
    begin = cast("str | None", tokenizer.bos_token) or None
    begin_id = cast(int, tokenizer.bos_token_id)
    end = cast(str, tokenizer.eos_token)
    begin_ids = prefix if begin_id in prefix else (*prefix, begin_id)

    def read(text: str) -> tuple[tuple[int, ...], str]:
        begins = begin is not None and text.startswith(begin)
        if begin is not None:
            text = text.removeprefix(begin)
        before_end, found, after_end = text.rpartition(end)
        if found and not after_end.strip():
            text = before_end
        return begin_ids if begins else prefix, text

    return read


def get_bpe_form(model_type: str) -> Tokenizer:
    """Return an untrained byte-level BPE with the normalization and splitting of transformers'
    class for `model_type`.

    If the class uses tokenizer.json unchanged, or is not a byte-level BPE, the result is like
    GPT-2's, without normalization.
    """
    # Imported here because transformers takes 0.5 to 1 s, and readers of titanlite.data may not
    # need a tokenizer.
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import (
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    form = Tokenizer(models.BPE())
    form.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    form.decoder = decoders.ByteLevel()
    cls = tokenizer_class_from_name(
        TOKENIZER_MAPPING_NAMES.get(model_type) or "PreTrainedTokenizerFast"
    )
    if (
        cls is None
        or not issubclass(cls, PreTrainedTokenizerFast)
        or "__init__" not in vars(cls)
        or getattr(cls, "model", None) is not models.BPE
    ):
        return form
    theirs = cls().backend_tokenizer
    if isinstance(theirs.decoder, decoders.ByteLevel):
        form.normalizer = theirs.normalizer
        form.pre_tokenizer = theirs.pre_tokenizer
        form.decoder = theirs.decoder
    return form


def train_bpe(corpus: Corpus, vocab_size: int, form: Tokenizer | None = None) -> Tokenizer:
    """Train a byte-level BPE with the settings of `form`, by default GPT-2's. It encodes any text,
    without loss except for normalization.

    Token 0 is '<|endoftext|>', tokens 1 to 256 are the bytes. The result is the same for the same
    corpus, regardless of the number of threads. A corpus above 24 MiB is sampled in evenly spaced
    pieces of about that total size. A small corpus may have too few pairs to merge, and give fewer
    tokens than `vocab_size`.
    """
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # all 256 bytes, even those not in the corpus: no unknown token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = form or get_bpe_form("")
    tokenizer.train_from_iterator(_get_training_pieces(corpus), trainer)
    return tokenizer


def _get_training_pieces(corpus: Corpus) -> Iterator[str]:
    """Return the text to train on: every nth piece of the corpus, with n = 1 unless it is too
    large.
    """
    stride = -(-corpus.num_bytes // _MAX_TRAINING_BYTES)
    documents = corpus.get_documents([END_OF_TEXT], Counter())
    pieces = (piece for text in documents for piece in split_text(text, _TRAINING_PIECE_CHARS))
    return (piece for i, piece in enumerate(pieces) if i % stride == 0)


def build_tokenizer(data: DataSection, corpus: Corpus, model_type: str = "") -> HFTokenizer:
    """Return the tokenizer at `data.tokenizer_path`, or a byte-level BPE of `data.bpe_vocab_size`
    tokens for `corpus`.

    The BPE has the form of `get_bpe_form(model_type)`. It is trained once per machine, corpus and
    size, and cached; several processes may call at once. The result has an `eos_token_id`, and
    `save_pretrained(folder)` makes a folder that transformers' `AutoTokenizer` loads. The network
    is never used.

    Raises DataError: the path holds no usable tokenizer, or the tokenizer has no end-of-text token.
    """
    if data.tokenizer_path:
        return load_tokenizer(data.tokenizer_path)
    form = get_bpe_form(model_type)
    recipe = (
        f"{_RECIPE_VERSION} {tokenizers.__version__} {data.bpe_vocab_size} {corpus.digest} "
        f"{corpus.separator} {form.to_str()}"
    )
    name = f"bpe-{data.bpe_vocab_size}-{sha256(recipe.encode()).hexdigest()[:16]}.json"
    path = get_cache_folder(data) / "tokenizers" / name

    def build() -> None:
        replace_file(path, train_bpe(corpus, data.bpe_vocab_size, form).to_str())

    tokenizer, elapsed_s = load_or_build(path, lambda: _load_cached(path), build)
    if elapsed_s:
        megabytes = min(corpus.num_bytes, _MAX_TRAINING_BYTES) / 1e6
        logger.info(
            f"data: trained a byte-level BPE tokenizer, {tokenizer.get_vocab_size()} tokens, on "
            f"{megabytes:.1f} MB in {elapsed_s:.1f} s"
        )
    # imported here for the reason given in get_bpe_form
    from transformers import PreTrainedTokenizerFast

    # Clean-up would drop the space in "a ," when decoding, so text would be lost in the round trip.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def _load_cached(path: Path) -> Tokenizer | None:
    try:
        serialized = path.read_text(encoding="utf-8")
        # ValueError for a truncated file; Tokenizer would raise a bare Exception
        json.loads(serialized)
    except (FileNotFoundError, ValueError):
        return None
    return Tokenizer.from_str(serialized)


def load_tokenizer(path: str | Path) -> HFTokenizer:
    """Load a folder with tokenizer.json (and tokenizer_config.json), or a single tokenizer.json;
    never from the network.

    A folder with tokenizer_config.json is loaded through `AutoTokenizer`, so training uses the
    tokens that users of the exported model will see. If that file names no specific class,
    tokenizer.json decides; a warning reports a difference. Without tokenizer_config.json, the
    end-of-text token is the first known name in the vocabulary.

    Raises DataError: there is no tokenizer.json, transformers cannot load it (code in the folder is
    never run), or it has no end-of-text token.
    """
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    has_config = path.is_dir() and (path / "tokenizer_config.json").is_file()
    if not file.exists() or file.is_dir():
        raise DataError(
            f"data: tokenizer_path {path}: {file} does not exist. Set data.tokenizer_path to a "
            "folder with tokenizer.json, or empty it to train a byte-level BPE."
        )
    try:
        if has_config:
            tokenizer = load_from_folder("AutoTokenizer", path)
        else:
            tokenizer = load_tokenizer_file(file)
    # the tokenizers library raises no more specific error for a malformed file
    except Exception as error:
        raise DataError(
            f"data: tokenizer_path {path}: transformers cannot load it ({describe_error(error)}). "
            "Check the files, or empty data.tokenizer_path to train a byte-level BPE."
        ) from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise DataError(
            f"data: tokenizer_path {path}: {type(tokenizer).__name__} does not use tokenizer.json. "
            "Convert it with transformers and save it again."
        )
    if has_config:
        tokenizer = _take_as_it_is(tokenizer, path)
    if tokenizer.eos_token_id is None:
        vocabulary = tokenizer.get_vocab()
        known = [name for name in _KNOWN_END_OF_TEXT if name in vocabulary]
        if not known:
            raise DataError(
                f"data: tokenizer_path {path}: no end-of-text token. Add eos_token to its "
                "tokenizer_config.json."
            )
        tokenizer.eos_token = known[0]
    return tokenizer


def _take_as_it_is(tokenizer: HFTokenizer, folder: Path) -> HFTokenizer:
    """Return `tokenizer` of `folder`; or the tokenizer in tokenizer.json, if the configuration
    names no specific class and the two differ.
    """
    table = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if table.get("tokenizer_class") not in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        return tokenizer
    plain = load_from_folder("PreTrainedTokenizerFast", folder)
    if plain(_PROBE)["input_ids"] == tokenizer(_PROBE)["input_ids"]:
        return tokenizer
    logger.warning(
        f"data: {folder}: transformers' AutoTokenizer builds {type(tokenizer).__name__}, which "
        "tokenizes text differently from tokenizer.json. Training uses tokenizer.json; elsewhere, "
        "load it with PreTrainedTokenizerFast.from_pretrained."
    )
    return plain


# Contractions, digits, composed letters, other scripts, emoji, spaces and line ends, for which
# splittings differ.
_PROBE = (
    "It's I'LL 3 1234567 3.14, x=[1];\tA  b   c \n\n  d\r\n cafe\u0301 \u00c5ngstro\u0308m "
    "stra\u00dfe \u4f60\u597d\u4e16\u754c \ud55c\uad6d\uc5b4 "
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f469\u200d\U0001f680!!! --== don't_do-this  "
    "\n"
)


def follow_tokenizer(
    job: JobConfig, model_config: AnyModelConfig, num_ids: int, tp: int, saved: Path | None
) -> JobConfig:
    """Return `job`; a new model of a flavor gets as many embedding rows as the tokenizer has ids.

    A configured size takes precedence, and so does the size in the checkpoint `saved` that the run
    resumes from. A flavor with up to twice as many rows as ids keeps them: the vocabularies of real
    models are padded. `tp` ranks share the rows evenly.

    Raises ConfigError, the same on all ranks: the rows are not divisible by `tp`.
    """
    model = job.model
    rows = model_config.vocab_size
    if (
        not model.flavor
        or model.overrides.vocab_size is not None
        or job.checkpoint.initial_load_path
    ):
        return job
    wanted = rows if num_ids <= rows <= 2 * num_ids else num_ids
    if saved is not None:
        with suppress(OSError, ValueError, KeyError):  # damaged: the run will not resume from it
            wanted = read_json(saved / "config.json")["vocab_size"]
    if wanted == rows:
        return job
    if wanted % tp:
        raise ConfigError(
            f"model: the tokenizer has {num_ids} tokens, and an embedding with as many rows cannot "
            f"be split by tensor_parallel_degree = {tp}. Set model.overrides.vocab_size = "
            f"{-(-wanted // tp) * tp}."
        )
    logger.info(
        f"model: vocab_size is {wanted}, as the tokenizer has, instead of {model.flavor}'s {rows}"
    )
    return replace(job, model=replace(model, overrides=replace(model.overrides, vocab_size=wanted)))


def check_vocabulary(
    job: JobConfig, vocab_size: int, num_ids: int, model_config: AnyModelConfig
) -> list[str]:
    """Return a problem if token ids in the data (below `vocab_size`) have no row in the embedding.

    Only warn if ids of the tokenizer (below `num_ids`) have no row, or if there are far too many
    rows.
    """
    rows = model_config.vocab_size
    wanted = max(vocab_size, num_ids)
    if wanted > rows:
        if job.checkpoint.initial_load_path:
            remedy = (
                f"save the model again after transformers' resize_token_embeddings({wanted}) and "
                f"set {weights_key(job)} to that folder"
            )
        elif isinstance(model_config, ModelConfig):
            remedy = f"set model.overrides.vocab_size = {wanted}"
        else:
            remedy = f"set vocab_size = {wanted} in its config.json"
        text = (
            f"data: the tokenizer has {wanted} tokens, but the model's vocab_size is {rows}. Use "
            f"the model's own tokenizer, or {remedy}."
        )
        if vocab_size > rows:
            return [text]
        warn_once(
            f"{text} The data has none of the tokens from {rows} on, so the run starts; but the "
            "saved model would fail on such a token."
        )
    if 2 * wanted < rows:
        warn_once(
            f"data: the tokenizer has {wanted} tokens, the embedding {rows} rows, of which most "
            "will never be trained. Set data.tokenizer_path to the model's own tokenizer, or "
            f"model.overrides.vocab_size = {wanted}."
        )
    return []


def find_token_ids(tokenizer: HFTokenizer | None) -> dict[str, int | None]:
    """Return the token ids for config.json, by their names there."""
    if tokenizer is None:
        return {}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def describe_tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a transformers tokenizer, content by file name; empty without a
    tokenizer. Call on one rank.

    Raises CheckpointError: the tokenizer cannot be saved.
    """
    if tokenizer is None:
        return {}

    def write(folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        # an object's own attribute also has the names that are found here
        standard = type(tokenizer).SPECIAL_TOKENS_ATTRIBUTES
        tokens = tokenizer.special_tokens_map.items()
        named = {key: token for key, token in tokens if key not in standard}
        _rewrite_tokenizer_config(folder / "tokenizer_config.json", named)

    return render("the tokenizer (data.tokenizer_path)", write)


def _rewrite_tokenizer_config(path: Path, named: Mapping[str, str]) -> None:
    """Rewrite the entries of tokenizer_config.json that only transformers 5 understands, so that
    transformers 4 and older versions of vLLM can read the file too.

    `named` are special tokens with the model's own names, such as image_token.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    if table.get("tokenizer_class") == "TokenizersBackend":
        table["tokenizer_class"] = "PreTrainedTokenizerFast"
    # transformers 4 expects a table there, and raises an error otherwise
    if isinstance(table.get("extra_special_tokens"), list):
        table["additional_special_tokens"] = table.pop("extra_special_tokens")
    if named:
        table["extra_special_tokens"] = dict(named)
    table = {key: value for key, value in table.items() if key not in _NOT_WRITTEN}
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
