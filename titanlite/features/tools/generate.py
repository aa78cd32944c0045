"""`python -m titanlite generate MODEL --prompt TEXT`: continue prompts with a model on one process
or many.

On several ranks, each with a part of the model: `python -m titanlite.launch --nproc-per-node 4 -m
titanlite generate ...` (torchrun works too). The text goes to standard output, messages to standard
error.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlite.base.agree import get_rank, on_first_rank
from titanlite.base.errors import ConfigError, DataError, TitanliteError, raise_problems
from titanlite.base.files import read_regular
from titanlite.base.process import keep_freed_memory, read_variable
from titanlite.base.text import Parser, command, format_count, parse_object
from titanlite.checkpoint.folder import ADAPTER_CONFIG, read_json
from titanlite.config import AnyModelConfig
from titanlite.config.assets import local_folder
from titanlite.config.settings import spell_dtype
from titanlite.data.tokenizer import count_ids, load_tokenizer
from titanlite.features.generate.generate import (
    Continuation,
    Sampling,
    generate,
    get_end_of_turn_ids,
    get_eos_token_ids,
)
from titanlite.features.sft.readers import RowError, read_rows
from titanlite.features.tools.models import (
    MODEL_HELP,
    find_base,
    find_model,
    load_model,
    read_config,
)
from titanlite.launch.process_group import end_distributed, init_distributed
from titanlite.ops.attention import leave_out_cudnn
from titanlite.ops.matmul import keep_float32

_TIMEOUT_S = 600
_shorten = partial(shorten, width=60, placeholder="...")


class _Request(NamedTuple):
    """The checked arguments of a generation, the same on all ranks."""

    folder: Path  # of the weights
    adapters: Path | None  # folder of adapters to merge into them
    config: AnyModelConfig
    dtype: str
    chat: bool  # render messages with the tokenizer's chat template
    prompts: list[str]  # for people
    prompt_ids: list[list[int]]
    eos_token_ids: list[int]
    vocab_size: int  # number of tokens that the tokenizer knows


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Generate and print; exit code 0, or 2 after one clear error."""
    options = _parser().parse_args(argv)
    code = 0
    try:
        _run(options)
    except TitanliteError:
        code = 2
        if get_rank() == 0:  # all ranks have the same answers
            raise
    finally:
        if dist.is_initialized():
            if code == 0:
                # a rank that exits early can tear down connections of a peer that is still
                # answering
                dist.barrier()
            end_distributed()
    return code


def _parser() -> Parser:
    parser = Parser("generate", "Continue prompts with a model.")
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a prompt per line; .jsonl: rows with prompt or messages",
    )
    add(
        "--chat",
        action="store_true",
        help="render prompts as messages of a user, by the tokenizer's chat template",
    )
    add("--system", metavar="TEXT", help="system message of each chat; implies --chat")
    add(
        "--chat-template-kwargs",
        default="",
        metavar="JSON",
        help="arguments of the chat template, as an object",
    )
    add("--tokenizer", type=Path, metavar="DIR", help="default: that of MODEL")
    add(
        "--base",
        metavar="MODEL",
        help="the model of adapters; default: the one that adapter_config.json names",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--do-sample", nargs="?", choices=("true", "false"), const="true", help="draw tokens")
    add(
        "--temperature",
        type=float,
        help="0: the likeliest token; default: 1 with other settings of sampling, else 0",
    )
    add("--top-k", type=int, default=0, metavar="K", help="0 (default): all tokens")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--seed", type=int, default=0)
    dtypes = ("auto", "float32", "bfloat16", "float16")
    text = "auto (default): the model's; float32 on the CPU"
    add("--dtype", type=spell_dtype, choices=dtypes, default="auto", help=text)
    add(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="prompts at once per data-parallel rank",
    )
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that split each layer; the others shard by FSDP",
    )
    add("--ep", type=int, default=1, metavar="N", help="ranks that split the experts")
    return parser


def _sampling(options: argparse.Namespace) -> Sampling:
    draws = options.do_sample == "true" or options.top_k != 0 or options.top_p != 1
    temperature = float(draws) if options.temperature is None else options.temperature
    return Sampling(
        0.0 if options.do_sample == "false" else temperature,
        options.top_k,
        options.top_p,
        options.seed,
    )


def _run(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dims = None
    leave_out_cudnn()
    keep_float32()
    if read_variable("RANK") is not None:
        device = init_distributed(_TIMEOUT_S)
    if device.type == "cpu":
        keep_freed_memory()
    sampling = _sampling(options)
    problems = sampling.check()
    for name, value in (
        ("--max-new-tokens", options.max_new_tokens),
        ("--batch-size", options.batch_size),
    ):
        if value < 1:
            problems.append(f"{name} = {value} is out of range. Set it to 1 or more.")
    raise_problems(ConfigError, "generate", problems)
    local_folder("generate: MODEL", options.model, weights=True)  # on each machine
    tokenizer: Any = None

    def prepare() -> _Request:
        nonlocal tokenizer
        folder = find_model("generate", options.model)
        adapters = folder if (folder / ADAPTER_CONFIG).exists() else None
        base = find_base("generate", folder, options.base) if adapters else folder
        tokenizer = _load_tokenizer(*([options.tokenizer] if options.tokenizer else [folder, base]))
        return _prepare(options, base, adapters, tokenizer, device)

    request = on_first_rank(prepare)
    where = (request.folder, request.config, request.dtype, device)
    model, dims = load_model(*where, tp=options.tp, ep=options.ep, adapters=request.adapters)
    began = time.perf_counter()
    continuations = generate(
        model,
        request.prompt_ids,
        max_new_tokens=options.max_new_tokens,
        device=device,
        dims=dims,
        eos_token_ids=request.eos_token_ids,
        vocab_size=min(request.vocab_size, request.config.vocab_size),
        sampling=sampling,
        batch_size=options.batch_size,
    )
    seconds = time.perf_counter() - began
    if get_rank() == 0:
        _print_texts(request, continuations, tokenizer)
        count = sum(len(continuation.tokens) for continuation in continuations)
        print(
            f"generate: {format_count(len(continuations), 'prompt')}, {count} new tokens in "
            f"{seconds:.2f} s, {count / seconds:.1f} tokens/s",
            file=sys.stderr,
        )


def _load_tokenizer(*places: Path) -> Any:
    for path in places:
        if (path / "tokenizer.json" if path.is_dir() else path).exists():
            return load_tokenizer(path)
    raise DataError(
        f"generate: {places[0]} has no tokenizer.json. Give a folder that has one with --tokenizer "
        "DIR."
    )


def _prepare(
    options: argparse.Namespace,
    base: Path,
    adapters: Path | None,
    tokenizer: Any,
    device: torch.device,
) -> _Request:
    config = read_config("generate", base, adapters)
    prompts = list(options.prompt)
    if options.prompts_file is not None:
        prompts += _read_prompts(options.prompts_file)
    if not prompts:
        raise ConfigError(
            "generate: there is no prompt. Give --prompt TEXT or --prompts-file FILE."
        )
    is_chat = options.chat or options.system is not None
    if is_chat and not tokenizer.chat_template:
        raise DataError(
            "generate: --chat: the tokenizer has no chat template. Leave --chat out and give "
            "--prompt TEXT, or add a template."
        )
    ids = [_encode(tokenizer, prompt, chat=is_chat, options=options) for prompt in prompts]
    limit = config.max_position_embeddings
    problems = []
    for number, tokens in enumerate(ids, start=1):
        if not tokens:
            problems.append(f"prompt {number} has no tokens. Write something into it.")
        elif limit is not None and len(tokens) + options.max_new_tokens > limit:
            problems.append(
                f"prompt {number} has {len(tokens)} tokens; with --max-new-tokens "
                f"{options.max_new_tokens} that is more than the model's max_position_embeddings "
                f"({limit}). Shorten it, or lower --max-new-tokens."
            )
        elif max(tokens) >= config.vocab_size:
            problems.append(
                f"prompt {number} has token {max(tokens)}, the model's vocab_size is "
                f"{config.vocab_size}. Use the model's own tokenizer."
            )
    raise_problems(ConfigError, "generate", problems)
    shown = [
        prompt if isinstance(prompt, str) else json.dumps(prompt["messages"], ensure_ascii=False)
        for prompt in prompts
    ]
    dtype = _dtype(options.dtype, base, device)
    ends = {
        *get_eos_token_ids(tokenizer, base),
        *(get_end_of_turn_ids(tokenizer) if is_chat else ()),
    }
    return _Request(
        base, adapters, config, dtype, is_chat, shown, ids, sorted(ends), count_ids(tokenizer)
    )


def _dtype(asked: str, folder: Path, device: torch.device) -> str:
    if asked != "auto":
        return asked
    table = read_json(folder / "config.json", f"generate: {folder}")
    stored = table.get("dtype", table.get("torch_dtype"))
    # Few CPUs have bfloat16 instructions; without them it is 80 times slower than float32.
    return "bfloat16" if device.type == "cuda" and stored in ("bfloat16", "float16") else "float32"


def _read_prompts(path: Path) -> list[Any]:
    where = f"generate: --prompts-file {path}"
    try:
        if path.suffix == ".jsonl":
            return [_read_prompt(f"{where}, row {number}", row) for number, row in read_rows(path)]
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start} is not UTF-8. Save the file as UTF-8."
        ) from None
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]


def _read_prompt(where: str, row: Any) -> Any:
    if not isinstance(row, dict):
        raise DataError(f"{where}: {row}")  # `row` is the error
    prompt = row.get("messages", row.get("prompt"))
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
        raise DataError(f"{where}: has neither prompt (a string) nor messages (a list).")
    return prompt if isinstance(prompt, str) else row | {"messages": prompt}


def _encode(tokenizer: Any, prompt: Any, *, chat: bool, options: argparse.Namespace) -> list[int]:
    """Return the tokens of a text, of a row with messages or, with `chat`, of a text as a user's
    message.
    """
    if not chat:
        if not isinstance(prompt, str):
            raise ConfigError("generate: messages need a chat template to become text. Add --chat.")
        return tokenizer.encode(prompt)
    from titanlite.features.sft.encode import encode_prompt

    row = (
        dict(prompt)
        if isinstance(prompt, dict)
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    arguments = parse_object("generate: --chat-template-kwargs", options.chat_template_kwargs)
    row = {"chat_template_kwargs": arguments} | row
    if options.system is not None:
        row["messages"] = [{"role": "system", "content": options.system}, *row["messages"]]
    try:
        return encode_prompt(tokenizer, row)
    except RowError as error:
        shown = _shorten(str(row["messages"]))
        raise DataError(f"generate: --chat: the chat template refuses {shown}: {error}") from None


def _print_texts(request: _Request, continuations: Sequence[Continuation], tokenizer: Any) -> None:
    for i, continuation in enumerate(continuations):
        if len(continuations) > 1:
            print(f"--- {i + 1}: {_shorten(request.prompts[i])}")
        text = text_of(tokenizer, request.prompt_ids[i], continuation.tokens)
        print(("" if request.chat else request.prompts[i]) + text)


def text_of(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Decode the new tokens together with the prompt: when decoded alone, many tokenizers drop the
    space before a word.
    """
    before: str = tokenizer.decode(prompt)
    text: str = tokenizer.decode([*prompt, *new])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)
