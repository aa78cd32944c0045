#!/usr/bin/env python
"""Does titanlite take every model of transformers? Builds each one tiny, and compares titanlite with transformers.

    python tests/sweep/sweep_transformers.py [TYPE ...] [--part 2/8] [--stages reads,builds,probes]

Every causal and image-text class of the installed transformers gets a configuration shrunk so that each kind of layer
is there, and random weights. A stage is a function of `STAGES` that returns one word for the table, or raises: a
`TitanliteError` is a refusal, shown with its reason, and anything else is a traceback. The exit code is 1 if there is a
traceback, or a result that starts with "WRONG".
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from sweep_stages import loads, scratch
from sweep_table import Result, table_of
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
_SIZES: tuple[tuple[str, int | None], ...] = (
    ("index_n_heads", 64),  # with fewer, ReLU leaves scores of 0 and ties
    (
        r"(linear_|swa_)?(num_)?(key_value_heads|kv_heads|query_groups|global_key_value_heads)|multi_query_group_num|n_kv_head",
        2,
    ),
    (r"linear_num_key_heads|index_kv_heads", 2),
    (r"mamba_(num|n)_heads|mamba_n_heads|linear_num_value_heads", 4),
    (
        r"(\w+_)?(num|n)_(attention_|global_attention_)?heads?|(num_)?(encoder|decoder)_(attention_)?heads|n_head|nhead",
        4,
    ),
    (
        r"(mamba_|linear_key_|linear_value_|qk_rope_|v_|index_|mamba_d_|lightning_)head_dim|mamba_d_head|attention_head_dim",
        16,
    ),
    (r"(\w+_)?head_dim|head_size|d_kv|kv_channels|attention_head_size|head_width|(qk_)?(rope|nope)_dim|rotary_dim", 16),
    (r"(q|kv|o|k|v)_lora_rank|time_step_rank|mamba_dt_rank|\w*lora_rank|\w*low_rank_dim|\w*lora_dim", 16),
    (r"vocab_size|(\w+_)?vocab_size|codebook_size|num_embeddings", 256),
    (
        r"max_(position_embeddings|target_positions|source_positions|seq_len(gth)?)|n_positions|n_ctx|(seq|context)_length|block_size",
        128,
    ),
    (r"sliding_window|window_size|attention_window|local_window|attention_chunk_size|index_topk|index_block_size", 8),
    (
        r"(\w+_)?(num|n)_(local_|routed_)?experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts",
        4,
    ),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k(_experts)?|moe_k|num_selected_experts|num_experts_per_tokens", 2),
    (r"(mamba_)?n_groups", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|moe_layer_start_index|num_shared_experts|n_shared_experts", 1),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)|ssm_d_state", 16),
    (
        r"(\w+_)?(ffn_dim|ffn_size|intermediate_size|inner_size|ffn_hidden_size|d_ff|mlp_dim|n_inner|lru_width|intermediate_dim)",
        64,
    ),
    (
        r"(\w+_)?(hidden_size|embed_dim|embedding_size|d_model|n_embd|model_dim|emb_dim|projection_dim|proj_dim|hidden_dim|dim|width|embed_proj_dim)",
        64,
    ),
    (r"(\w+_)?(image_size|img_size)", None),
    (r"(\w+_)?(num_)?(hidden_)?(layers|blocks)|n_layers?|depth|num_\w*layers|(encoder|decoder)_layers", 2),
)
_RANDOM = re.compile(r"drop|jitter|pdrop")  # what makes a forward in training mode random
_PER_LAYER = re.compile(r"layer_?types|layers_block_type|\w*_layer_types|layer_types|mlp_only_layers|no_rope_layers")
_ALTERNATING = ["sliding_attention", "full_attention"]
# What the rules above do not find, by type and place.
_ROPES = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _ALTERNATING}
_GEMMA4 = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16}
_QUERIES = {"num_query_tokens": 4, "image_token_index": 5, "video_token_index": 5}
_DOTS3 = {
    "head_dim": 32,
    "num_key_value_heads": 4,
    "per_layer_config": {2: {"num_key_value_heads": 4}},
}
_MROPE, _HALF_MROPE = (
    {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}}
    for sections in ([2, 3, 3], [1, 1, 2])
)
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _ALTERNATING * 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    **_GEMMA4,
}
_TINY_VIT = {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": 64, "depth": 2, "num_heads": 2}}
_FUSED_QKV = {"num_attention_heads": 4, "num_key_value_heads": 4}  # stored in one, and cut into three equal parts
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_FIXES: Mapping[str, Mapping[str, Any]] = {
    "bamba": _MAMBA,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": _MAMBA,
    "mamba2": {"num_heads": 8},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl"), _MROPE),
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 2, 2, 2]}}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [64, 64],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
        }
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "xlm": {"causal": True},
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _QUERIES),
    "kosmos-2": {"latent_query_num": 4},
    "paligemma": {"vision_config": {"image_size": 28}},
    **dict.fromkeys(("glm4v", "glm_ocr", "glm46v", "glmga"), _MROPE),
    "glm4v_moe": _HALF_MROPE,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "xmod": {"default_language": "en_XX"},
    "nemo_speechlm": {
        "audio_config": {"asr_config": _FUSED_QKV, "diarization_config": {"audio_config": _FUSED_QKV}},
        "word_timestamp_config": _FUSED_QKV,
    },
    "vibevoice_asr": {f"{kind}_tokenizer_encoder_config": {"num_filters": 2} for kind in ("acoustic", "semantic")},
    "gemma3n_text": _GEMMA3N,
    "gemma3n": {"text_config": _GEMMA3N, "vision_config": _TINY_VIT},
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8", "hidden_size": 768}},
    "perception_lm": {"vision_config": _TINY_VIT},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "vit_layers": [1, 0]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": 16, "attn_type": "uni"},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_topk": 16}},
    "longcat_flash": {"qk_head_dim": 32},
    "mistral4": {"head_dim": 32},
    "zamba2": {"mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32} | {"hybrid_layer_ids": [1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "emu3": {
        "vocabulary_map": {"<image>": 5},
        "text_config": {"vocabulary_map": {"<image>": 5}},
        "vq_config": {"base_channels": 32},
    },
    "janus": {"vq_config": {"base_channels": 32}},
    "gemma4_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "dots3_note_text": _DOTS3,
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "florence2": {
        "vision_config": {"depths": [1] * 4, "embed_dim": [16, 32, 64, 64], "num_heads": [2] * 4, "num_groups": [2] * 4}
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "cohere_compass": {"text_config": {"rope_parameters": _ROPES}},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 128},
        "decoder_config": {"hidden_size_global": 128},
        "global_config": {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}


@dataclass
class Case:
    """One class of transformers with its tiny configuration; made when it is first asked for."""

    model_type: str
    class_name: str
    folder: Path = Path()
    notes: dict[str, Any] = field(default_factory=dict)  # what one stage leaves for the next

    def __str__(self) -> str:
        return f"{self.model_type} {self.class_name}"

    @cached_property
    def cls(self) -> Any:
        """The class of transformers."""
        return getattr(transformers, self.class_name)

    @cached_property
    def model(self) -> Any:
        """The model of transformers on the CPU, in evaluation mode; every parameter is random."""
        config_cls = transformers.CONFIG_MAPPING[self.model_type]
        errors = []
        for levels in range(3):
            try:
                config = own_part(shrink(config_cls, self.model_type, levels), self.cls)
                with torch.device("meta"):
                    size = sum(param.numel() for param in self.cls._from_config(copy.deepcopy(config)).parameters())
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
    def ours(self) -> TransformersModel:
        """Model of titanlite around the same tensors, in evaluation mode."""
        return TransformersModel(self.model, self.config, {}).eval()

    @cached_property
    def saved(self) -> Path:
        """The folder, with what transformers saves of the model."""
        self.model.save_pretrained(self.folder)
        return self.folder

    @cached_property
    def config(self) -> TransformersConfig:
        """Configuration that titanlite makes of the config.json that transformers saves."""
        self.model.config.architectures = [self.class_name]
        self.model.config.save_pretrained(self.folder)
        found = resolve_model_config(ModelSection(hf_assets_path=str(self.folder), implementation="transformers"))
        assert isinstance(found, TransformersConfig)
        return found


def add_noise(model: Any) -> None:
    """Make every parameter random, norms and biases too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param += 0.05 * torch.randn(param.shape, generator=generator)


class NotBuiltError(Exception):
    """transformers does not build the class from the configuration that this script shrinks."""


def cases() -> list[Case]:
    """Every pair of a type and a class of the auto mappings, in their order; no encoder-decoders."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    pairs: dict[tuple[str, str], None] = {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM):
        for model_type, names in auto._model_mapping._model_mapping.items():  # type: ignore[attr-defined]
            for name in names if isinstance(names, tuple | list) else [names]:
                pairs[model_type, name] = None
    refused = {kind for kind, _ in pairs if transformers.CONFIG_MAPPING[kind].is_encoder_decoder}
    return [Case(*pair) for pair in pairs if pair[0] not in refused]


def shrink(config_cls: Any, model_type: str, levels: int = 0) -> Any:
    """A configuration of `config_cls` with small sizes; `levels` of its sections keep their defaults on retries."""
    table = config_cls().to_dict()
    small = _shrunk(table, skip_sizes=levels > 1)
    _update(small, _FIXES.get(model_type, {}))
    if levels > 0:
        small = _without_lists(small)
    return config_cls.from_dict(small)


def own_part(config: Any, cls: Any) -> Any:
    """The part of a composite configuration that `cls` is made of; the whole one if that is not a part of it."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((part for part in parts if type(part) is cls.config_class), config)


def _update(table: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(table.get(key), dict):
            _update(table[key], value)
        else:
            table[key] = value


def _without_lists(table: dict[str, Any]) -> dict[str, Any]:
    """Without lists of layers, which the configuration then makes itself."""
    return {
        key: _without_lists(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if not (isinstance(value, list) and _PER_LAYER.fullmatch(key))
    }


def _shrunk(table: Mapping[str, Any], skip_sizes: bool) -> dict[str, Any]:
    small = dict(table)
    for key, value in table.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")) and key != "per_layer_config":
            small[key] = _shrunk(value, skip_sizes)
        elif isinstance(value, float) and _RANDOM.search(key):
            small[key] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            small[key] = value if skip_sizes else _small_size(key, value)
    layers = next(
        (key for key in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(table.get(key), int)), None
    )
    if layers is not None:
        _keep_kinds(table, small, layers)
    for key, value in small.items():  # token ids
        if re.search(r"_token_(id|index)$|_token_ids$", key) and isinstance(value, int) and value >= 200:
            small[key] = 200 + value % 50
    if small.get("kv_lora_rank") and isinstance(small.get("num_attention_heads"), int):  # latent attention
        small["num_key_value_heads"] = small["num_attention_heads"]
    if small.get("is_decoder") is False:
        small["is_decoder"] = True  # or BERT and its kin are not causal
    rope = small.get("rope_parameters")
    if isinstance(rope, dict):
        small["rope_parameters"] = _small_rope(rope)
    return small


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    found = {key: _small_rope(value) if isinstance(value, dict) else value for key, value in rope.items()}
    if "mrope_section" in found:
        found["mrope_section"] = [2, 3, 3] if len(found["mrope_section"]) == 3 else [2, 2, 2, 2]
    return found


def _small_size(key: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            return value if size is None else min(value, size)
    return value


def _keep_kinds(table: Mapping[str, Any], small: dict[str, Any], layers: str) -> None:
    """One layer of each kind, at least two; lists with an entry per layer are cut alike."""
    count = table[layers]
    lists = {key: value for key, value in table.items() if isinstance(value, list | tuple) and len(value) == count > 2}
    own = {int(i): value for i, value in (table.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(str([own.get(i), *(v[i] for v in lists.values() if isinstance(v[i], str | bool))]), i)
    chosen = sorted(kinds.values())[:6]
    chosen += [i for i in range(count) if i not in chosen][: max(0, 2 - len(chosen))]
    small[layers] = len(chosen) if lists or own else min(count, 2)
    if own:
        small["per_layer_config"] = {
            i: {key: 32 if key == "head_dim" else _small_size(key, size) for key, size in own[old].items()}
            for i, old in enumerate(sorted(chosen))
            if old in own
        }
    for key, value in lists.items():
        small[key] = [
            _small_size(key.rstrip("s"), item) if type(item) is int else item
            for item in map(value.__getitem__, sorted(chosen))
        ]


# --- stages: in this order; each gets the case, and may rely on those before it


def built(case: Case) -> str:
    """Build the class from the shrunk configuration."""
    return f"{sum(param.numel() for param in case.model.parameters()) / 1e6:.1f} M"


def reads(case: Case) -> str:
    """Read the config.json that transformers saves; the class is the same."""
    found = case.config.architecture
    return "yes" if found == case.class_name else f"WRONG: {found}"


def builds(case: Case) -> str:
    """Describe the class on meta: the same names and shapes as transformers' own."""
    ours = build_transformers(case.config)
    expected = {name: tuple(tensor.shape) for name, tensor in case.model.state_dict().items()}
    return "yes" if ours.state_shapes == expected else "WRONG: other tensors"


def probes(case: Case) -> str:
    """What titanlite finds out about causality and documents is what transformers' own forward shows."""
    tokens = torch.randint(3, 190, (1, 24), generator=torch.Generator().manual_seed(2))
    ours, inner = case.ours, case.model
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8])
    one = torch.tensor([[0] * 20 + [-1] * 4])

    def alone(row: torch.Tensor) -> torch.Tensor | None:
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
            return "not causal" if "not causal" in refused else f"WRONG: not causal, but {refused or 'accepted'}"
        single = ours(tokens, document_ids_BS=one)[:, :20]
        if not _is_close(single, whole):
            return "WRONG: one document"
        if packed is None:
            return "apart" if "mixes" in refused else f"WRONG: {refused}"
        return "packed" if _is_close(packed, expected) else "WRONG: packed"


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-4 * expected.norm())  # float32; experts see other numbers of rows


STAGES: tuple[Callable[[Case], str], ...] = (
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


def run(case: Case, stages: tuple[Callable[[Case], str], ...]) -> Iterator[str]:
    """The word of each stage for one case; one that is not built has no others."""
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
            own = next((frame for frame in reversed(where) if "titanlite/" in frame.filename), where[-1])
            yield f"TRACEBACK: {type(error).__name__}: {error} ({Path(own.filename).name}:{own.lineno})"


def run_apart(case: Case, stages: tuple[Callable[[Case], str], ...], limit_s: int) -> list[str]:
    """As `run`, in a process of its own that may take `limit_s` seconds of CPU time, and 5 times as long in all."""
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
def quiet() -> Iterator[None]:
    """Neither transformers' nor titanlite's log, which say much about models this small."""
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


def main() -> int:
    """Print a line for each case, and the table; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth case, from the Ith on")
    parser.add_argument("--sample", type=int, default=0, help="so many cases, others with each version; 0: all")
    parser.add_argument("--stages", default=",".join(stage.__name__ for stage in STAGES))
    parser.add_argument("--case-s", type=int, default=60, help="seconds of CPU time for a case")
    parser.add_argument("--results", type=Path, help="file of lines in JSON, to which each case's is added")
    given = parser.parse_args()
    number, parts = map(int, given.part.split("/"))
    stages = tuple(stage for stage in STAGES if stage.__name__ in given.stages.split(","))
    chosen = [case for case in cases() if not given.types or case.model_type in given.types][number - 1 :: parts]
    if given.sample:
        chosen = random.Random(f"{titanlite.__version__} {transformers.__version__}").sample(chosen, given.sample)
    results = []
    with quiet():
        for case in chosen:
            words = run_apart(case, stages, given.case_s)
            names = [stage.__name__ for stage in stages]
            results.append(Result(case.model_type, case.class_name, dict(zip(names, words, strict=False))))
            print(results[-1], flush=True)
            if given.results:
                with given.results.open("a") as file:
                    print(json.dumps(asdict(results[-1])), file=file)
    print(*table_of(results), sep="\n")
    return int(any(result.is_wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
