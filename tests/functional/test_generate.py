"""Generation on any mesh gives transformers' tokens: greedy, batched, prompts of different
lengths.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.functional.conftest import weekly
from tests.loading import EVERY_FAMILY, hf_checkpoint, save_random_model
from titanlite.assemble import shard
from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims
from titanlite.features.generate.generate import Sampling, generate
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder

FAMILIES = EVERY_FAMILY | {
    **{
        name: [f"--model.name={name}", "--model.overrides.sliding_window=4"]
        for name in ("ministral", "gpt_oss")
    },
    # The prompts are as long as the model's pretraining sequences, and their continuations are
    # longer.
    "yarn": [
        "--model.name=qwen2",
        "--model.overrides.rope_scaling.rope_type=yarn",
        "--model.overrides.rope_scaling.factor=8",
        "--model.overrides.rope_scaling.original_max_position_embeddings=10",
    ],
}
# One process and TP2xFSDP2 run all families.
ON_MESH = {
    "FSDP4": {"qwen3_moe", "qwen3", "glm4_moe"},
    "TP2xFSDP2": FAMILIES.keys(),
    "TP2xEP2": {"qwen3_moe", "dots1", "deepseek_v3"},
    "CP2xTP2": {"qwen3_moe", "yarn", "gpt_oss"},
    "PP2xTP2xEP2": {"qwen3_moe", "glm4_moe"},
    "PP2xCP2": {"llama", "dots1", "deepseek_v3", "qwen3_next"},
}
NEW = 7
# There are 7 prompts: on 4 data-parallel ranks one rank has only one, and in batches of 1 it joins
# a forward without prompts.
_LENGTHS = (3, 9, 1, 14, 6, 2, 5)
_GENERATOR = torch.Generator().manual_seed(3)
FEW = 3
PROMPTS = [torch.randint(310, (n,), generator=_GENERATOR).tolist() for n in _LENGTHS]


@dataclass(frozen=True)
class Reference:
    """A model saved by transformers, and how transformers continues PROMPTS."""

    folder: Path
    tokens: list[list[int]]


def continue_with_transformers(model, prompts):
    """Continue greedily, with all prompts in one batch, padded on the left as transformers
    requires.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(input_ids=ids, attention_mask=mask, **options)[:, longest:].tolist()


@pytest.fixture(scope="module")
def references(configure, tmp_path_factory):
    found = {}
    for family, overrides in FAMILIES.items():
        folder = tmp_path_factory.mktemp("hf")
        model = save_random_model(configure(Degrees(), *overrides).model_config, folder)
        found[family] = Reference(folder, continue_with_transformers(model, PROMPTS))
    return found


@pytest.fixture
def load(checked, references):
    """`load(family, degrees, *overrides)` on every rank -> (model, dims)."""

    def build(family, degrees, *overrides):
        job = checked(degrees, *FAMILIES[family], *overrides)
        model = build_decoder(job.model_config)
        dims = ParallelDims.build(job.degrees, "cpu")
        shard(model, job.job, dims, "cpu")
        source = hf_checkpoint(references[family].folder, job.model_config)
        materialize(model, "cpu", [source], group=dims.stage_group)
        return model, dims

    return build


def tokens_of(continuations):
    return [continuation.tokens for continuation in continuations]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "mesh",
    [
        "1",
        "CP2xTP2",
        "PP2xCP2",
        *(weekly(mesh) for mesh in ("FSDP4", "TP2xFSDP2", "TP2xEP2", "PP2xTP2xEP2")),
    ],
)
def test_tokens_are_those_of_transformers(run_ranks, references, load, meshes, mesh):
    """All prompts run together. One family also runs them one by one, which works the same way in
    all families.
    """
    degrees = meshes[mesh]
    families = ON_MESH.get(mesh, FAMILIES.keys())

    def rank_main():
        found = {}
        for family in sorted(families):
            model, dims = load(family, degrees)
            model.train()
            options = {"max_new_tokens": NEW, "device": CPU, "dims": dims}
            found[family] = tokens_of(generate(model, PROMPTS, **options))
            if family == "qwen3_moe":
                few = generate(model, PROMPTS[:FEW], **options, batch_size=1)
                assert tokens_of(few) == found[family][:FEW], "one by one"
            assert model.training, "generation must leave the model as it was"
        return found

    for found in run_ranks(degrees.world_size, rank_main):
        assert found.keys() == families
        for family, tokens in found.items():
            assert tokens == references[family].tokens, f"{mesh} {family}"


def test_the_reference_is_no_constant(references):
    """The comparison above can fail: texts differ by prompt, and tokens within a text."""
    for family, reference in references.items():
        assert len({tuple(tokens) for tokens in reference.tokens}) == len(PROMPTS), family
        assert max(len(set(tokens)) for tokens in reference.tokens) > 4, family


@pytest.mark.parametrize("mesh", ["CP2xEP2", weekly("FSDP4")])
def test_draws_are_those_of_one_process(run_ranks, load, meshes, mesh):
    """A prompt's draws depend on its number and the seed alone, not on mesh or batch."""
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=5)

    def rank_main(degrees, batch_size, drawn=sampling):
        model, dims = load("qwen3_moe", degrees)
        options = {"max_new_tokens": NEW, "device": CPU, "dims": dims, "batch_size": batch_size}
        return tokens_of(generate(model, PROMPTS, sampling=drawn, **options))

    (one,) = run_ranks(1, rank_main, Degrees(), 16)
    for found in run_ranks(4, rank_main, meshes[mesh], 3):
        assert found == one
    (other,) = run_ranks(
        1, rank_main, Degrees(), 16, Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=6)
    )
    assert sum(a != b for a, b in zip(one, other, strict=True)) > 3


def test_a_text_ends_at_each_of_the_eos_tokens(run_ranks, references, load, meshes):
    """Rows end at different steps on different ranks; the remaining rows continue to their own
    end.
    """
    degrees = meshes["TP2xFSDP2"]
    expected = references["llama"].tokens
    ends = {expected[0][3], expected[3][5]}
    cut = [next((i for i, token in enumerate(tokens) if token in ends), NEW) for tokens in expected]
    assert len(set(cut)) > 1 and NEW in cut

    def rank_main():
        model, dims = load("llama", degrees)
        return generate(
            model,
            PROMPTS,
            max_new_tokens=NEW,
            device=CPU,
            dims=dims,
            eos_token_ids=sorted(ends),
            batch_size=2,
        )

    for found in run_ranks(degrees.world_size, rank_main):
        assert tokens_of(found) == [tokens[:end] for tokens, end in zip(expected, cut, strict=True)]
        assert [continuation.ended for continuation in found] == [end < NEW for end in cut]


@pytest.mark.parametrize("mesh", ["PP2xTP2xEP2", weekly("CP2xTP2xEP4")])
def test_a_model_without_a_cache_gives_the_same_tokens(run_ranks, references, load, meshes, mesh):
    degrees = meshes[mesh]

    class Plain(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, tokens):
            return self.inner(tokens)

    def rank_main():
        model, dims = load("qwen3_moe", degrees)
        return tokens_of(
            generate(Plain(model), PROMPTS, max_new_tokens=NEW, device=CPU, dims=dims, batch_size=3)
        )

    for found in run_ranks(degrees.world_size, rank_main):
        assert found == references["qwen3_moe"].tokens


def test_one_forward_of_one_token_per_row_and_step(run_ranks, load):
    """The cache makes this possible. Under tp the rows of a step share one sequence; 3 rows are
    padded to 4.
    """

    def rank_main(degrees):
        model, dims = load("qwen3_moe", degrees)
        shapes = []
        model.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
        generate(model, PROMPTS[:3], max_new_tokens=4, device=CPU, dims=dims)
        return shapes

    assert run_ranks(1, rank_main, Degrees()) == [[(3, 9), (1, 3), (1, 3), (1, 3)]]
    shapes = run_ranks(2, rank_main, Degrees(tp=2))
    assert shapes == [[(3, 10), (1, 4), (1, 4), (1, 4)]] * 2


@pytest.mark.parametrize("setting", ["activation_checkpoint.mode=selective", "compile.enable=true"])
def test_with_what_training_wraps_around_layers(run_ranks, references, load, setting):
    """A compiled layer runs uncompiled: its shapes change with every token."""

    def rank_main():
        model, dims = load("qwen3_moe", Degrees(), f"--{setting}")
        return tokens_of(generate(model, PROMPTS, max_new_tokens=NEW, device=CPU, dims=dims))

    assert run_ranks(1, rank_main) == [references["qwen3_moe"].tokens]
