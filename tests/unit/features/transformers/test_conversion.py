"""Placeholders follow transformers' operations exactly, tensors that they cannot follow are
converted whole, and every problem is reported.
"""

import os
import re
import shutil
from functools import partial

import pytest
import torch
from files import error_of, read_json
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tensors import changed
from tiny_transformers import mapping_of, save_tiny, store_as
from torch.distributed.fsdp import fully_shard

from tests.saving import model_files, save_hf_model
from titanlite.base.errors import PlanError
from titanlite.checkpoint.hf_model import weights_of
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.conversion import ConvertingReader, Traced
from titanlite.materialize import ReadRequest, Region, materialize
from titanlite.models.families.config_json import transformers_config


def assembled(traced, sources):
    """Return the tensor that a placeholder describes, element by element from its sources."""
    out = torch.full(traced.shape, -1)
    for part in traced.parts:
        block = sources[part.key][Region(part.source_starts, part.source_lengths).slices]
        where = Region(part.starts, part.lengths).slices
        assert (out[where] == -1).all(), "blocks are disjoint"
        out[where] = block.reshape(part.lengths)
    assert (out >= 0).all(), "blocks cover the tensor"
    return out


@given(
    experts=st.integers(1, 3),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    stack_dim=st.integers(0, 2),
    cat_dim=st.integers(0, 2),
    cut_dim=st.integers(0, 2),
    chunks=st.integers(1, 3),
)
@settings(max_examples=40)
def test_stand_ins_are_where_the_elements_are(experts, shape, stack_dim, cat_dim, cut_dim, chunks):
    names = [f"{e}.{part}" for part in ("gate", "up") for e in range(experts)]
    sources = {
        name: torch.arange(shape[0] * shape[1]).view(shape) + 100 * i
        for i, name in enumerate(names)
    }

    def convert(value_of):
        stacked = [
            torch.stack([value_of(f"{e}.{part}") for e in range(experts)], dim=stack_dim)
            for part in ("gate", "up")
        ]
        whole = torch.cat(stacked, dim=cat_dim)
        cut = torch.chunk(whole, chunks, dim=cut_dim)
        first = torch.split(cut[0], [1, cut[0].shape[cut_dim] - 1], dim=cut_dim)[0]
        return [whole, *cut, first, first.squeeze(cut_dim)]

    traced = convert(lambda name: Traced.source(name, tuple(sources[name].shape)))
    for got, expected in zip(traced, convert(sources.__getitem__), strict=True):
        assert got.shape == tuple(expected.shape)
        assert torch.equal(assembled(got, sources), expected)


@pytest.mark.parametrize("operation", [lambda x: x.T, lambda x: x.mul_(2)])
def test_stand_ins_forget_their_elements_in_other_operations(operation):
    found = operation(Traced.source("name", (2, 3)))
    assert isinstance(found, Traced) and found.parts == ()


# --- through a checkpoint


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    save_tiny("mixtral", folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return folder


def build(folder):
    return build_transformers(transformers_config(read_json(folder / "config.json"), "test"))


def edited(folder, out, edit):
    """Return a copy of a checkpoint with other tensors."""
    shutil.copytree(folder, out)
    with changed(out / "model.safetensors") as tensors:
        edit(tensors)
    return out


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        (
            lambda t: t.update(extra=torch.ones(2)),
            ["extra: unexpected, checkpoint .* has it and the model does not"],
        ),
        (
            lambda t: t.pop(EXPERT),
            [r"mlp\.experts\.gate_up_proj: .*Expected 3 in dimension 0 but got 4"],
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}),
            [
                r"mlp\.experts\.gate_up_proj: checkpoint .*w1\.weight is torch\.float8_e4m3fn "
                r"without scales"
            ],
        ),
        (
            lambda t: [t.pop(key) for key in [*t] if ".w2." in key],
            [
                r"layers\.0\.mlp\.experts\.down_proj: missing",
                r"layers\.1\.mlp\.experts\.down_proj: missing",
            ],
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_names(mixtral, tmp_path, edit, messages):
    folder = edited(mixtral, tmp_path / "edited", edit)
    model = build(folder)
    text = error_of(PlanError, materialize, model, "cpu", [weights_of(folder, model)])
    for message in messages:
        assert re.search(message, text), text
    assert all(param.is_meta for param in model.parameters()), "nothing was allocated"


def test_each_rank_reads_its_bytes_only(mixtral, monkeypatch):
    """A rank reads only the expert weights that its region needs, not the experts of other
    ranks.
    """
    model = build(mixtral)
    provider = weights_of(mixtral, model)
    plan = materialize(model, "cpu", [provider])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    shape = model.state_shapes[name]
    region = Region((1, 0, 0), (1, *shape[1:]))
    (source,) = (entry.source for entry in plan.entries if entry.fqn == name)
    preadv, sizes = os.preadv, []
    monkeypatch.setattr(
        os, "preadv", lambda *arguments: (sizes.append(preadv(*arguments)), sizes[-1])[1]
    )
    source.reader.read([ReadRequest(source.name, region, torch.empty(region.lengths))])
    assert sum(sizes) == 4 * shape[1] * shape[2]


def test_what_was_read_is_saved_under_its_keys(run_ranks, mixtral, tmp_path):
    """Mixtral's files have other names than transformers' class, and separate experts."""

    def rank_main():
        model = build(mixtral)
        plan = materialize(model, "cpu", [weights_of(mixtral, model)])
        save_hf_model(model, plan, None, tmp_path / "saved", torch.float32)

    run_ranks(1, rank_main)
    stored, saved = (
        load_file(path / "model.safetensors") for path in (mixtral, tmp_path / "saved")
    )
    assert stored.keys() == saved.keys() and EXPERT in saved
    assert [name for name in stored if not torch.equal(stored[name], saved[name])] == []


@pytest.mark.parametrize(
    ("kind", "name", "whole"),
    [
        ("transposed", "mlp.down_proj", {"down_proj"}),
        ("fused", "self_attn.qkv", set()),
        ("side_by_side", "mlp.gate_up", {"gate_proj", "up_proj"}),
    ],
)
def test_other_layouts_are_read_and_written_back(run_ranks, llama, tmp_path, kind, name, whole):
    """A transposed weight, and columns of a stored one, are converted whole; fused rows are cut
    while they are read. All are saved in their original layout. Of the tensors that are converted
    for the save, a rank keeps only the part that it writes.
    """
    mapping = mapping_of(kind)
    folder = edited(llama, tmp_path / kind, partial(store_as, kind))
    expected = load_file(llama / "model.safetensors")

    def rank_main():
        model = build(folder)
        model.all_conversions = mapping
        for layer in model.decoder_layers():
            fully_shard(layer)
        fully_shard(model)
        plan = materialize(model, "cpu", [weights_of(folder, model)])
        items = [
            item for file in model_files(plan, model.config, torch.float32) for item in file.items
        ]
        assert not any(item.is_owner for item in items if item.local.is_meta)
        left = [item.key for item in items if item.local.is_meta]
        for entry in plan.entries:
            if entry.fqn in expected:
                assert torch.equal(entry.tensor.full_tensor(), expected[entry.fqn]), entry.fqn
        save_hf_model(model, plan, None, tmp_path / "saved", torch.float32)
        readers = {entry.fqn: getattr(entry.source, "reader", None) for entry in plan.entries}
        read = {
            name.split(".")[-2]
            for name, reader in readers.items()
            if isinstance(reader, ConvertingReader)
        }
        return read, left

    assert run_ranks(2, rank_main) == [
        (whole, [f"model.layers.{layer}.{name}.weight"]) for layer in (1, 0)
    ]
    stored, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert stored.keys() == saved.keys()
    assert [name for name in stored if not torch.equal(stored[name], saved[name])] == []
