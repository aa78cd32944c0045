#!/usr/bin/env python
"""Does titanlite take every model of transformers? Builds each one tiny, and compares titanlite
with transformers.

    python tests/sweep/sweep_transformers.py [TYPE ...] [--stages reads,builds,probes]

Every causal and image-text class of the installed transformers gets a configuration shrunk so that
each kind of layer is there, and random weights. A stage is a function of `STAGES` that returns one
word for the table, or raises: a `TitanliteError` is a refusal, shown with its reason, and anything
else is a traceback. The exit code is 1 if there is a traceback, or a result that starts with
"WRONG".
"""

import argparse
import copy
import json
import logging
import os
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from sweep_stages import loads, scratch
from sweep_training import exports, generates, trains

import titanlite
from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.config.model import ModelSection, TransformersConfig
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.model import TransformersModel
from titanlite.models.families import resolve_model_config

_MOST_PARAMETERS = 40_000_000
_SHOWN_CHARS = 600
# Values by the ends of names of settings; the first that fits counts. None: as it is.
# Small values: by names of settings, of which the first that fits counts (null: as it is), and by
# type and place for what those do not find. `index_n_heads` is not smaller, or ReLU leaves scores
# of 0 and ties.
_OVERRIDES = json.loads(Path(__file__).with_name("overrides.json").read_text())
_RANDOM = re.compile(r"drop|jitter|pdrop")  # what makes a forward in training mode random
_PER_LAYER = re.compile(
    r"layer_?types|layers_block_type|\w*_layer_types|layer_types|mlp_only_layers|no_rope_layers"
)


@dataclass
class Case:
    """One class of transformers with its tiny configuration; its parts are made when they are first
    used.
    """

    model_type: str
    class_name: str
    folder: Path = Path()
    notes: dict[str, Any] = field(default_factory=dict)  # what one stage leaves for the next

    def __str__(self):
        return f"{self.model_type} {self.class_name}"

    @cached_property
    def cls(self):
        """The class of transformers."""
        return getattr(transformers, self.class_name)

    @cached_property
    def model(self):
        """The model of transformers on the CPU, in evaluation mode; every parameter is random."""
        config_cls = transformers.CONFIG_MAPPING[self.model_type]
        errors = []
        for levels in range(3):
            try:
                config = own_part(shrink(config_cls, self.model_type, levels), self.cls)
                with torch.device("meta"):
                    size = sum(
                        param.numel()
                        for param in self.cls._from_config(copy.deepcopy(config)).parameters()
                    )
                if size > _MOST_PARAMETERS:
                    raise ValueError(f"{size / 1e6:.0f} M parameters")
                torch.manual_seed(0)
                model = self.cls._from_config(config, dtype=torch.float32).eval()
            except Exception as error:  # noqa: BLE001 - of transformers, all kinds of them
                errors.append(f"{type(error).__name__}: {error}")
                continue
            add_noise(model)
            return model
        raise NotBuiltError(errors[0])

    @cached_property
    def ours(self):
        """Model of titanlite around the same tensors, in evaluation mode."""
        return TransformersModel(self.model, self.config, {}).eval()

    @cached_property
    def saved(self):
        """The folder with the model as transformers saves it."""
        self.model.save_pretrained(self.folder)
        return self.folder

    @cached_property
    def config(self):
        """The configuration that titanlite makes of the config.json that transformers saves."""
        self.model.config.architectures = [self.class_name]
        self.model.config.save_pretrained(self.folder)
        found = resolve_model_config(
            ModelSection(hf_assets_path=str(self.folder), implementation="transformers")
        )
        assert isinstance(found, TransformersConfig)
        return found


def add_noise(model):
    """Make every parameter random, norms and biases too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param += 0.05 * torch.randn(param.shape, generator=generator)


class NotBuiltError(Exception):
    """transformers does not build the class from the configuration that this script shrinks."""


def cases(types=None):
    """Every pair of a type, or one of `types`, and a class of the auto mappings, in their order; no
    encoder-decoders.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    pairs = {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
        for model_type, names in auto._model_mapping._model_mapping.items():  # type: ignore[attr-defined]
            if types is not None and model_type not in types:
                continue  # its configuration need not be imported
            for name in names if isinstance(names, tuple | list) else [names]:
                pairs[model_type, name] = None
    refused = {kind for kind, _ in pairs if transformers.CONFIG_MAPPING[kind].is_encoder_decoder}
    return [Case(*pair) for pair in pairs if pair[0] not in refused]


def save_cases(types, folder):
    """Return the case of each of `types` by its name, saved below `folder`."""
    found = {case.model_type: case for case in cases(types)}
    for name, case in found.items():
        case.folder = folder / name
        assert case.config.family == name and case.saved
    return found


def shrink(config_cls, model_type, levels=0):
    """A configuration of `config_cls` with small sizes; `levels` of its sections keep their
    defaults on retries.
    """
    table = config_cls().to_dict()
    small = _shrunk(table, skip_sizes=levels > 1)
    _update(small, copy.deepcopy(_OVERRIDES["types"].get(model_type, {})))
    if levels > 0:
        small = _without_lists(small)
    return config_cls.from_dict(small)


def own_part(config, cls):
    """Return the part of a composite configuration that belongs to `cls`, or the whole one if it
    has no such part.
    """
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((part for part in parts if type(part) is cls.config_class), config)


def _update(table, changes):
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(table.get(key), dict):
            _update(table[key], value)
        else:
            table[key] = value


def _without_lists(table):
    """Remove lists of layers, which the configuration then makes itself."""
    return {
        key: _without_lists(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if not (isinstance(value, list) and _PER_LAYER.fullmatch(key))
    }


def _shrunk(table, skip_sizes):
    small = dict(table)
    for key, value in table.items():
        if (
            isinstance(value, dict)
            and ("model_type" in value or key.endswith("_config"))
            and key != "per_layer_config"
        ):
            small[key] = _shrunk(value, skip_sizes)
        elif isinstance(value, float) and _RANDOM.search(key):
            small[key] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            small[key] = value if skip_sizes else _small_size(key, value)
    layers = next(
        (
            key
            for key in ("num_hidden_layers", "n_layer", "num_layers")
            if isinstance(table.get(key), int)
        ),
        None,
    )
    if layers is not None:
        _keep_kinds(table, small, layers)
    for key, value in small.items():  # token ids
        if (
            re.search(r"_token_(id|index)$|_token_ids$", key)
            and isinstance(value, int)
            and value >= 200
        ):
            small[key] = 200 + value % 50
    # latent attention
    if small.get("kv_lora_rank") and isinstance(small.get("num_attention_heads"), int):
        small["num_key_value_heads"] = small["num_attention_heads"]
    if small.get("is_decoder") is False:
        small["is_decoder"] = True  # otherwise BERT and similar models are not causal
    rope = small.get("rope_parameters")
    if isinstance(rope, dict):
        small["rope_parameters"] = _small_rope(rope)
    return small


def _small_rope(rope):
    found = {
        key: _small_rope(value) if isinstance(value, dict) else value for key, value in rope.items()
    }
    if "mrope_section" in found:
        found["mrope_section"] = [2, 3, 3] if len(found["mrope_section"]) == 3 else [2, 2, 2, 2]
    return found


def _small_size(key, value):
    for pattern, size in _OVERRIDES["sizes"].items():
        if re.fullmatch(pattern, key):
            return value if size is None else min(value, size)
    return value


def _keep_kinds(table, small, layers):
    """One layer of each kind, at least two; lists with an entry per layer are cut alike."""
    count = table[layers]
    lists = {
        key: value
        for key, value in table.items()
        if isinstance(value, list | tuple) and len(value) == count > 2
    }
    own = {int(i): value for i, value in (table.get("per_layer_config") or {}).items()}
    kinds = {}
    for i in range(count):
        kinds.setdefault(
            str([own.get(i), *(v[i] for v in lists.values() if isinstance(v[i], str | bool))]), i
        )
    chosen = sorted(kinds.values())[:6]
    chosen += [i for i in range(count) if i not in chosen][: max(0, 2 - len(chosen))]
    small[layers] = len(chosen) if lists or own else min(count, 2)
    if own:
        small["per_layer_config"] = {
            i: {
                key: 32 if key == "head_dim" else _small_size(key, size)
                for key, size in own[old].items()
            }
            for i, old in enumerate(sorted(chosen))
            if old in own
        }
    for key, value in lists.items():
        small[key] = [
            _small_size(key.rstrip("s"), item) if type(item) is int else item
            for item in map(value.__getitem__, sorted(chosen))
        ]


# --- stages: in this order; each gets the case, and may rely on those before it


def built(case):
    """Build the class from the shrunk configuration."""
    return f"{sum(param.numel() for param in case.model.parameters()) / 1e6:.1f} M"


def reads(case):
    """Read the config.json that transformers saves; the class is the same."""
    found = case.config.architecture
    return "yes" if found == case.class_name else f"WRONG: {found}"


def builds(case):
    """Describe the class on meta: the same names and shapes as transformers' own."""
    ours = build_transformers(case.config)
    expected = {name: tuple(tensor.shape) for name, tensor in case.model.state_dict().items()}
    return "yes" if ours.state_shapes == expected else "WRONG: other tensors"


def probes(case):
    """Compare titanlite's facts about causality and documents with transformers' own forward."""
    tokens = torch.randint(3, 190, (1, 24), generator=torch.Generator().manual_seed(2))
    ours, inner = case.ours, case.model
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8])
    one = torch.tensor([[0] * 20 + [-1] * 4])

    def alone(row):
        try:
            with torch.no_grad():
                return inner(input_ids=row, use_cache=False, return_dict=True).logits
        except Exception:  # noqa: BLE001 - of transformers, all kinds of them
            return None

    whole, changed = alone(tokens[:, :20]), tokens[:, :20].clone()
    changed[0, -1] = 191
    other = alone(changed)
    parts = [alone(part) for part in tokens.split([5, 11, 8], dim=1)]
    with torch.no_grad():
        refused, packed = "", None
        try:
            packed = ours(tokens, document_ids_BS=documents)
        except ConfigError as error:
            refused = str(error)
        if "does not run on text" in refused:
            return "not on text"
        if whole is None or other is None or None in parts:
            return f"not on text ({refused})" if refused else "WRONG: accepted"
        causal = _is_close(other[:, :-1], whole[:, :-1])
        expected = torch.cat([part for part in parts if part is not None], dim=1)
        if not causal:
            return (
                "not causal"
                if "not causal" in refused
                else f"WRONG: not causal, but {refused or 'accepted'}"
            )
        single = ours(tokens, document_ids_BS=one)[:, :20]
        if not _is_close(single, whole):
            return "WRONG: one document"
        if packed is None:
            return "apart" if "mixes" in refused else f"WRONG: {refused}"
        return "packed" if _is_close(packed, expected) else "WRONG: packed"


def _is_close(found, expected):
    # float32; experts see other numbers of rows
    return bool((found - expected).norm() <= 1e-4 * expected.norm())


STAGES = (
    built,
    reads,
    builds,
    probes,
    generates,
    loads,
    trains,
    exports,
    scratch,
)


def run(case, stages):
    """Return the word of each stage for one case; a case that is not built has no further words."""
    for stage in stages:
        try:
            yield stage(case)
        except NotBuiltError as error:
            yield f"not built: {error}"
            return
        except TitanliteError as error:
            yield f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - a traceback is what this script looks for
            where = traceback.extract_tb(error.__traceback__)
            own = next(
                (frame for frame in reversed(where) if "titanlite/" in frame.filename), where[-1]
            )
            yield (
                f"TRACEBACK: {type(error).__name__}: {error} "
                f"({Path(own.filename).name}:{own.lineno})"
            )


def run_apart(case, stages, limit_s):
    """Run the case like `run`, in a separate process that may take `limit_s` seconds of CPU time,
    and 5 times as long in all.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(5 * limit_s)
            with os.fdopen(writer, "w") as pipe, tempfile.TemporaryDirectory() as folder:
                case.folder = Path(folder)
                for word in run(case, stages):
                    print(" ".join(word.split())[:_SHOWN_CHARS], file=pipe, flush=True)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        words = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        late = number in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
        words.append(f"LIMIT: {limit_s} s" if late else f"TRACEBACK: {signal.Signals(number).name}")
    return words


@contextmanager
def quiet():
    """Silence the logs of transformers and titanlite, which write much about models this small."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity(), theirs.is_progress_bar_enabled(), logging.root.manager.disable
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(before[0])
        logging.disable(before[2])
        if before[1]:
            theirs.enable_progress_bar()


@dataclass
class Result:
    """The words of all stages about one class."""

    model_type: str
    class_name: str
    words: dict[str, str]

    @property
    def is_wrong(self):
        """True after a traceback, a difference, or too long a time."""
        return any(word.startswith(("TRACEBACK", "WRONG", "LIMIT")) for word in self.words.values())

    def __str__(self):
        return "| " + " | ".join([self.model_type, self.class_name, *self.words.values()]) + " |"


def count_words(results):
    """Yield a line for each stage with the counts of its words."""
    counts = defaultdict(Counter)
    for result in results:
        for stage, word in result.words.items():
            first = re.split(r"[ :,]", word)[0]
            counts[stage]["built" if re.fullmatch(r"[\d.]+ M", word) else first] += 1
    for stage, found in counts.items():
        yield f"{stage}: {', '.join(f'{count} {word}' for word, count in found.most_common())}"


def main():
    """Print a line for each case, and the table; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument(
        "--sample", type=int, default=0, help="so many cases, others with each version; 0: all"
    )
    parser.add_argument("--stages", default=",".join(stage.__name__ for stage in STAGES))
    parser.add_argument("--case-s", type=int, default=60, help="seconds of CPU time for a case")
    parser.add_argument(
        "--results", type=Path, help="file of lines in JSON, to which each case's is added"
    )
    given = parser.parse_args()
    stages = tuple(stage for stage in STAGES if stage.__name__ in given.stages.split(","))
    chosen = cases(given.types or None)
    if given.sample:
        chosen = random.Random(f"{titanlite.__version__} {transformers.__version__}").sample(
            chosen, given.sample
        )
    results = []
    with quiet():
        for case in chosen:
            words = run_apart(case, stages, given.case_s)
            names = [stage.__name__ for stage in stages]
            results.append(
                Result(case.model_type, case.class_name, dict(zip(names, words, strict=False)))
            )
            print(results[-1], flush=True)
            if given.results:
                with given.results.open("a") as file:
                    print(json.dumps(asdict(results[-1])), file=file)
    print(*count_words(results), sep="\n")
    return int(any(result.is_wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
