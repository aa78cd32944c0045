"""`python -m titanlite generate --model DIR --prompt TEXT`: continue prompts with a model, on one process or many.

Several ranks, each with a share of the model: `python -m titanlite.launch --nproc-per-node 4 -m titanlite generate ...`
(torchrun does as well). The text goes to standard output, what is said about it to standard error.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.assemble import build_model
from titanlite.base.agree import on_first_rank
from titanlite.base.errors import ConfigError, DataError, TitanliteError, raise_problems
from titanlite.base.files import parse_json, read_regular
from titanlite.checkpoint.commit import list_steps
from titanlite.checkpoint.folder import read_json
from titanlite.checkpoint.pretrained import weights_of
from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.assets import local_folder
from titanlite.config.parallelism import check_parallelism, resolve_degrees
from titanlite.config.patterns import parse_object
from titanlite.config.schema import ParallelismSection, TrainingSection
from titanlite.data.tokenizer import count_ids, load_tokenizer
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.distributed.process_group import end_distributed, init_distributed
from titanlite.features.cpu import install as install_cpu
from titanlite.features.generate.generate import (
    Continuation,
    Sampling,
    generate,
    get_end_of_turn_ids,
    get_eos_token_ids,
    name_of,
)
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.row_limits import run_row
from titanlite.materialize import materialize
from titanlite.metrics.out_of_memory import is_out_of_memory
from titanlite.models.families import any_model_config_from_hf
from titanlite.models.interface import Model
from titanlite.ops.attention import leave_out_cudnn

_TIMEOUT_S = 600
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Request:
    """What is to be generated, checked, and the same on all ranks.

    Attributes:
        folder: of the model.
        config: its sizes.
        dtype: of weights and activations.
        prompts: as text, for people.
        prompt_ids: as tokens.
        eos_token_ids: tokens that end a text.
        vocab_size: tokens that the tokenizer knows.
    """

    folder: Path
    config: AnyModelConfig
    dtype: str
    prompts: list[str]
    prompt_ids: list[list[int]]
    eos_token_ids: list[int]
    vocab_size: int


def main(argv: Sequence[str] | None = None) -> int:
    """Generate, print, and return the exit code: 0, or 2 after one clear error."""
    options = _parser().parse_args(argv)
    code = 0
    try:
        _run(options)
    except TitanliteError as error:
        if _is_first_rank():  # all ranks have the same one
            print(f"titanlite: error: {error}", file=sys.stderr)
        code = 2
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(f"titanlite: error: {_out_of_memory(options, error)}", file=sys.stderr)
        code = 2
    if dist.is_initialized():
        if code == 0:
            dist.barrier()  # a rank that leaves while a peer still answers can tear that one's connections down
        end_distributed()
    return code


def _out_of_memory(options: argparse.Namespace, error: Exception) -> str:
    said = str(error).strip().partition("\n")[0].rstrip(".")
    return (
        f"generate: rank {os.environ.get('RANK', '0')} ran out of memory{f' ({said})' if said else ''}. Lower "
        f"--batch-size ({options.batch_size}) or --max-new-tokens ({options.max_new_tokens}), or split the model over "
        f"more ranks (--tp {options.tp})."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m titanlite generate",
        description="Continue prompts with a Hugging Face model, or with a checkpoint of a run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face folder, hub id, or step-N folder of a run")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompts-file", type=Path, metavar="FILE", help="a prompt per line; .jsonl: objects with prompt or messages")
    add("--chat", action="store_true", help="render prompts as messages of a user, by the tokenizer's chat template")
    add("--chat-template-kwargs", default="", metavar="JSON", help="arguments of the chat template, as an object")
    add("--tokenizer", type=Path, metavar="DIR", help="default: that of --model")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, help="0 (default): always the most likely token")
    add("--top-k", type=int, default=0, metavar="K", help="0 (default): all tokens")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--seed", type=int, default=0)
    add(
        "--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="auto: the model's; float32 on the CPU"
    )
    add("--batch-size", type=int, default=16, metavar="N", help="prompts at once per data-parallel rank")
    add("--tp", type=int, default=1, metavar="N", help="ranks that split each layer; the others shard by FSDP")
    add("--ep", type=int, default=1, metavar="N", help="ranks that split the experts")
    add("--stream", action="store_true", help="print the text as it grows; for a single prompt")
    return parser


def _run(options: argparse.Namespace) -> None:
    device, dims = torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    leave_out_cudnn()
    if "RANK" in os.environ:
        device = init_distributed(_TIMEOUT_S)
    install_cpu(device)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    problems = sampling.check()
    for name, value in (("--max-new-tokens", options.max_new_tokens), ("--batch-size", options.batch_size)):
        if value < 1:
            problems.append(f"{name} = {value} is out of range. Set it to 1 or more.")
    if options.stream and (len(options.prompt) != 1 or options.prompts_file):
        problems.append("--stream shows one prompt as it is continued. Give a single --prompt, or leave it out.")
    raise_problems(ConfigError, "generate", problems)
    folder = Path(local_folder("--model", options.model, weights=True))
    tokenizer, request = None, None

    def prepare() -> Request:
        nonlocal tokenizer
        tokenizer = _load_tokenizer(folder, options.tokenizer)
        return _prepare(options, folder, tokenizer, device)

    request = on_first_rank(prepare)
    model, dims = load_model(request.folder, request.config, request.dtype, device, tp=options.tp, ep=options.ep)
    if not model.can_cache(device) and _is_first_rank():
        print(f"generate: {name_of(model)} keeps no keys and values: every token costs a full forward", file=sys.stderr)
    stream = None
    if options.stream:
        stream = _Stream(tokenizer, request.prompt_ids[0], "" if options.chat else request.prompts[0])
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
        on_token=None if stream is None else stream.add,
    )
    seconds = time.perf_counter() - began
    if _is_first_rank():
        if stream is not None:
            stream.end()
        else:
            _print_texts(request, continuations, tokenizer, options.chat)
        count = sum(len(continuation.tokens) for continuation in continuations)
        print(
            f"generate: {len(continuations)} prompts, {count} new tokens in {seconds:.2f} s, "
            f"{count / seconds:.1f} tokens/s",
            file=sys.stderr,
        )


def load_model(
    folder: Path, config: AnyModelConfig, dtype: str, device: torch.device, *, tp: int = 1, ep: int = 1
) -> tuple[Model, ParallelDims | None]:
    """The model in `folder` in evaluation mode, and its meshes; without a process group it is whole, on this process.

    Raises:
        ConfigError: the degrees fit neither the number of ranks nor the model.
        CheckpointError, PlanError, VerifyError: the weights are damaged or do not fit.

    Collectives: those of `materialize`; every rank must call.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    # A sequence is padded to a multiple of tp, whatever its length.
    training = TrainingSection(dtype=dtype, mixed_precision_param=dtype, seq_len=tp)  # type: ignore[arg-type]
    parallelism = ParallelismSection(tensor_parallel_degree=tp, expert_parallel_degree=ep)
    job = JobConfig(training=training, parallelism=parallelism)
    degrees = resolve_degrees(parallelism, world_size)
    raise_problems(ConfigError, "generate", check_parallelism(job, config, degrees))
    model = build_model(config, getattr(torch, dtype))
    dims = None
    if dist.is_initialized():
        dims = ParallelDims.build(degrees, device.type)
        parallelize(model, job, dims, device.type)
    materialize(model, device, [weights_of(folder, model)])
    return model.eval(), dims


def _load_tokenizer(folder: Path, asked: Path | None) -> Any:
    place = asked or folder
    if not folder.is_dir():
        raise ConfigError(f"generate: --model {folder} is no folder. Give a folder with config.json, or a hub id.")
    if not (folder / "config.json").exists() and (steps := _steps_below(folder)):
        raise ConfigError(f"generate: --model {folder} holds checkpoints. Give one of them: {', '.join(steps)}.")
    if not (place / "tokenizer.json" if place.is_dir() else place).exists():
        raise DataError(f"generate: {place} has no tokenizer.json. Give a folder that has one with --tokenizer DIR.")
    return load_tokenizer(place)


def _steps_below(folder: Path) -> list[str]:
    for inner in (folder, folder / "checkpoint"):
        if steps := list_steps(inner):
            return [str(inner / f"step-{step}") for step in steps]
    return []


def _prepare(options: argparse.Namespace, folder: Path, tokenizer: Any, device: torch.device) -> Request:
    """On rank 0."""
    config = any_model_config_from_hf(folder, "generate")
    prompts = [*options.prompt, *([] if options.prompts_file is None else _read_prompts(options.prompts_file))]
    if not prompts:
        raise ConfigError("generate: there is no prompt. Give --prompt TEXT or --prompts-file FILE.")
    arguments = parse_object("generate: --chat-template-kwargs", options.chat_template_kwargs)
    ids = [_encode(tokenizer, prompt, options.chat, arguments) for prompt in prompts]
    limit = config.max_position_embeddings
    problems = []
    for number, tokens in enumerate(ids, start=1):
        if not tokens:
            problems.append(f"prompt {number} has no tokens. Write something into it.")
        elif limit is not None and len(tokens) + options.max_new_tokens > limit:
            problems.append(
                f"prompt {number} has {len(tokens)} tokens; with --max-new-tokens {options.max_new_tokens} that is "
                f"more than the model's max_position_embeddings ({limit}). Shorten it, or lower --max-new-tokens."
            )
        elif max(tokens) >= config.vocab_size:
            problems.append(
                f"prompt {number} has token {max(tokens)}, the model's vocab_size is {config.vocab_size}. Use the "
                "model's own tokenizer."
            )
    raise_problems(ConfigError, "generate", problems)
    shown = list(map(_show, prompts))
    dtype = _dtype(options.dtype, folder, device)
    ends = {*get_eos_token_ids(tokenizer, folder), *(get_end_of_turn_ids(tokenizer) if options.chat else ())}
    return Request(folder, config, dtype, shown, ids, sorted(ends), count_ids(tokenizer))


def _dtype(asked: str, folder: Path, device: torch.device) -> str:
    if asked != "auto":
        return asked
    table = read_json(folder / "config.json", f"generate: {folder}")
    stored = table.get("dtype", table.get("torch_dtype"))
    # Few CPUs have bfloat16 instructions; without them it is 80 times slower than float32.
    return "bfloat16" if device.type == "cuda" and stored in ("bfloat16", "float16") else "float32"


def _read_prompts(path: Path) -> list[Any]:
    """Texts, or rows with messages."""
    where = f"generate: --prompts-file {path}"
    try:
        lines = read_regular(path, 2**30).decode("utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}, line {number}: is no JSON: {error}.") from None
        prompt = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt):
            raise DataError(f"{where}, line {number}: has neither prompt (a string) nor messages (a list).")
        prompts.append(prompt if isinstance(prompt, str) else row | {"messages": prompt})
    return prompts


def _encode(tokenizer: Any, prompt: Any, chat: bool, arguments: dict[str, Any] | None = None) -> list[int]:
    if not chat:
        if not isinstance(prompt, str):
            raise ConfigError("generate: messages need a chat template to become text. Add --chat.")
        return tokenizer.encode(prompt)
    if not tokenizer.chat_template:
        raise DataError("generate: --chat: the tokenizer has no chat template. Leave --chat out, or add a template.")
    from titanlite.features.sft.encode import encode_prompt

    row = prompt if isinstance(prompt, dict) else {"messages": [{"role": "user", "content": prompt}]}
    try:
        return run_row(encode_prompt, tokenizer, {"chat_template_kwargs": arguments or {}} | row)
    except RowError as error:
        shown = _shorten(str(row["messages"]))
        raise DataError(f"generate: --chat: the chat template refuses {shown}: {error}") from None


def _show(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt.get("messages"), ensure_ascii=False)


def _text_of(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """The new tokens as text, read together with the prompt: alone, many tokenizers drop the space before a word."""
    before: str = tokenizer.decode(prompt)
    text: str = tokenizer.decode(prompt + new)
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)


class _Stream:
    """Prints a text as its tokens arrive; a character is held back until its last token is there."""

    def __init__(self, tokenizer: Any, prompt: list[int], shown: str) -> None:
        self._tokenizer, self._prompt, self._new, self._printed = tokenizer, prompt, [], 0
        if _is_first_rank():
            print(shown, end="", flush=True)

    def add(self, token: int) -> None:
        """Print what this token makes readable."""
        self._new.append(token)
        text = _text_of(self._tokenizer, self._prompt, self._new)
        if not text.endswith("\ufffd"):
            print(text[self._printed :], end="", flush=True)
            self._printed = len(text)

    def end(self) -> None:
        """Print the rest and end the line."""
        print(_text_of(self._tokenizer, self._prompt, self._new)[self._printed :], flush=True)


def _print_texts(request: Request, continuations: Sequence[Continuation], tokenizer: Any, chat: bool) -> None:
    for i, continuation in enumerate(continuations):
        if len(continuations) > 1:
            print(f"--- {i + 1}: {_shorten(request.prompts[i])}")
        text = _text_of(tokenizer, request.prompt_ids[i], continuation.tokens)
        print(("" if chat else request.prompts[i]) + text)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 3] + "..."


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
