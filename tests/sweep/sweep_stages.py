"""Stages of `sweep_transformers.py` about weights: loaded from what transformers saved, and drawn
without a checkpoint.

A stage takes a case: `cls`, a class of transformers; `model`, a random one of it on the CPU, in
float32; `config`, titanlite's configuration for it; `folder`, where its config.json is, and
`saved`, the same with its weights. It returns a word, which starts with WRONG if titanlite differs,
or raises what titanlite raises.
"""

import copy

import torch

from titanlite.checkpoint.folder import read_model_headers
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.initial import UnitDraw
from titanlite.materialize import Init, materialize

_SEEDS = 3


def loads(case):
    """Load the folder that transformers saves, and compare every parameter, buffer and tie with
    `from_pretrained`.
    """
    try:
        expected, info = case.cls.from_pretrained(
            case.saved, dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError as error:
        return f"lost: transformers itself refuses what it saved: {error}"
    if info["missing_keys"]:
        return (
            f"lost: transformers itself misses {len(info['missing_keys'])} of the tensors that it "
            "saved"
        )
    model = build_transformers(case.config)
    materialize(
        model,
        "cpu",
        [model.checkpoint_format.sources(str(case.saved), read_model_headers(case.saved))],
    )
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = (
            dict(getattr(m, kind)(remove_duplicate=False))
            for m in (model.transformers_model, expected)
        )
        if found.keys() != wanted.keys():
            return f"WRONG: other {kind}: {sorted(found.keys() ^ wanted.keys())[:3]}"
        differing = [name for name, tensor in found.items() if not is_same(tensor, wanted[name])]
        if differing:
            return f"WRONG: {len(differing)} {kind}, among them {differing[0]}"
        if ties_of(found) != ties_of(wanted):
            return f"WRONG: other ties of {kind}"
    return "equal"


def scratch(case):
    """Draw the model with a few seeds, and compare each parameter, and its halves, with
    transformers' draws.

    Buffers, and values that do not depend on transformers' seed, must be equal; all other values
    must agree in mean, deviation and mean distance from the mean.
    """
    theirs, ours = [], []
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        theirs.append(case.cls._from_config(copy.deepcopy(case.model.config), dtype=torch.float32))
        ours.append(build_transformers(case.config))
        materialize(ours[-1], "cpu", seed=seed)
    params = [dict(model.named_parameters()) for model in theirs]
    own = [dict(model.transformers_model.named_parameters()) for model in ours]
    if own[0].keys() != params[0].keys():
        return f"WRONG: other parameters: {sorted(own[0].keys() ^ params[0].keys())[:3]}"
    wrong = []
    for name in own[0]:
        rows = own[0][name].shape[0] if own[0][name].dim() else 1
        found, expected = (
            torch.stack([of[name].detach().reshape(rows, -1) for of in models], dim=1)
            for models in (own, params)
        )
        for part in (slice(None), slice(0, rows // 2), slice(rows // 2, rows)):
            if expected[part].numel() and (text := other_moments(found[part], expected[part])):
                wrong.append(f"{name} {text}")
                break
    buffers = dict(ours[0].transformers_model.named_buffers())
    wrong += [
        name for name, buffer in theirs[0].named_buffers() if not is_same(buffers[name], buffer)
    ]
    if wrong:
        return f"WRONG: {len(wrong)}, among them {wrong[0]}"
    sources = ours[0].declare_sources().values()
    return (
        f"equal, {sum(isinstance(s, Init) and isinstance(s.recipe, UnitDraw) for s in sources)} "
        "by unit"
    )


def is_same(found, expected):
    """True for equal dtypes and values; NaN counts as a value."""
    if found.is_floating_point():
        found, expected = found.nan_to_num(nan=7.5), expected.nan_to_num(nan=7.5)
    return found.dtype == expected.dtype and torch.equal(found, expected)


def ties_of(tensors):
    """Group the names of one and the same tensor."""
    together = {}
    for name, tensor in tensors.items():
        together.setdefault(tensor, []).append(name)
    return sorted(together.values())


def other_moments(found, expected):
    """Describe differences between draws (rows, seeds, columns); empty if they agree.

    A moment of n draws varies by about their deviation / sqrt(n); a difference of 7 times this
    never occurs by chance.
    """
    if bool((expected == expected[:, :1]).all()):
        return (
            ""
            if torch.equal(found, expected)
            else f"has other values, {found.flatten()[0]:g} first"
        )
    for what, moment in (
        ("mean", torch.mean),
        ("deviation", torch.std),
        ("mean distance", lambda x: (x - x.mean()).abs().mean()),
    ):
        bound = 7 * max(found.std(), expected.std()) / found.numel() ** 0.5
        if not (moment(found) - moment(expected)).abs() <= bound:
            return f"has {what} {moment(found):.4g}, of transformers {moment(expected):.4g}"
    return ""
