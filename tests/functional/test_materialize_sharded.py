"""Seed regressions of materialization that need ranks: what a shard on 4 ranks must have in common
with one process.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.assemble import assemble
from titanlite.base.errors import PlanError
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import ExpertCopies
from titanlite.distributed.parallelize import parallelize
from titanlite.materialize import Alias, Init, Keep, Normal, Ones, Zeros, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.moe import Experts

SEED = 7
TIED = ["--model.name=qwen3"]


def build_sharded(checked, prepare=lambda model: None):
    """Build on meta, call `prepare(model)`, shard; nothing is materialized yet. Collective: every
    rank must call.
    """
    dims = ParallelDims.build(checked.degrees, "cpu")
    model = build_decoder(checked.model_config)
    prepare(model)
    parallelize(model, checked.job, dims, "cpu")
    return model


def reference_weights(checked):
    """All tensors of the same model on one process, under their first names."""
    plan = materialize(build_decoder(checked.model_config), "cpu", seed=SEED)
    return {entry.fqn: entry.tensor.detach() for entry in plan.entries}


def declare_for(module, sources):
    """Let this one module declare `sources`. Patches its class: call it on forked ranks only."""
    kind = type(module)
    original = kind.declare_sources
    kind.declare_sources = lambda self: sources if self is module else original(self)


class NoValueComparison(TorchDispatchMode):
    """Raises on aten::equal, which on meta has no answer (NeMo Automodel #1765)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.equal:
            raise AssertionError("two tensors were compared by value")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mesh", ["FSDP4", "TP2xFSDP2"])
def test_tied_embedding_stays_tied_and_is_never_compared_on_meta(run_ranks, checked, meshes, mesh):
    job = checked(meshes[mesh], *TIED)
    expected = reference_weights(job)
    tokens = torch.arange(2 * 16).view(2, 16)

    def rank_main():
        def is_tied():
            return model.lm_head.weight is model.model.embed_tokens.weight

        with NoValueComparison():
            model = build_sharded(job)
            tied = [is_tied()]
            plan = materialize(model, "cpu", seed=SEED)
            tied.append(is_tied())
            losses = model(tokens, tokens)
            losses.cross_entropy.backward()
            tied.append(is_tied())
        names = next(entry.names for entry in plan.entries if "lm_head.weight" in entry.names)
        weight = model.lm_head.weight
        num_params = len(list(model.parameters()))
        return tied, names, num_params, weight.full_tensor().detach(), weight.grad.full_tensor()

    one = build_decoder(job.model_config)
    materialize(one, "cpu", seed=SEED)
    one(tokens, tokens).cross_entropy.backward()
    # All 4 ranks had the same rows, and gradients are sums; over tp the rows are shared, so only dp
    # ranks add up.
    expected_grad = one.lm_head.weight.grad * job.degrees.dp
    for tied, names, num_params, weight, grad in run_ranks(4, rank_main):
        assert tied == [True, True, True], "after sharding, materialization, backward"
        assert names == ("model.embed_tokens.weight", "lm_head.weight")
        assert num_params == len(list(one.parameters()))
        assert torch.equal(weight, expected["model.embed_tokens.weight"])
        # Float32 sums in another order: a few units of the last place of the largest element.
        torch.testing.assert_close(
            grad, expected_grad, rtol=1e-5, atol=1e-6 * expected_grad.abs().max().item()
        )


def test_alias_that_sharding_split_is_an_error_on_all_ranks(run_ranks, checked, meshes):
    def rank_main():
        model = build_sharded(checked(meshes["FSDP4"], "--model.name=llama"))
        declare_for(model, {"lm_head.weight": Alias("model.embed_tokens.weight")})
        with pytest.raises(PlanError) as raised:
            materialize(model, "cpu")
        return str(raised.value)

    (message,) = set(run_ranks(4, rank_main))
    assert (
        "lm_head.weight: declared tied to 'model.embed_tokens.weight', but they are two tensors"
        in message
    )


@pytest.mark.parametrize("mesh", ["FSDP4", "TP2xEP2"])
def test_parameter_identity_attributes_and_maps_made_before_materialization_stay_valid(
    run_ranks, checked, meshes, mesh
):
    job = checked(meshes[mesh])
    tokens = torch.arange(2 * 16).view(2, 16)

    def tag(model):
        for name, param in model.named_parameters():
            param.before_sharding = name

    def rank_main():
        model = build_sharded(job, tag)
        params = dict(model.named_parameters())
        lost = [
            name
            for name, param in params.items()
            if getattr(param, "before_sharding", None) != name
        ]
        names_by_param = {param: name for name, param in params.items()}
        for name, param in params.items():
            param.before_materialization = name
        by_mesh = {}  # a foreach optimizer cannot mix meshes in one group
        for param in params.values():
            by_mesh.setdefault(id(param.device_mesh), []).append(param)
        optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=1e-2)

        materialize(model, "cpu", seed=SEED)
        wrong = [
            name
            for name, param in model.named_parameters()
            if param is not params[name]
            or names_by_param[param] != name
            or param.before_sharding != name
            or param.before_materialization != name
            or not isinstance(param, torch.nn.Parameter)
            or not param.requires_grad
        ]
        losses, before = (
            [],
            {name: param.detach().to_local().clone() for name, param in params.items()},
        )
        for _ in range(3):
            loss = model(tokens, tokens).cross_entropy / tokens.numel()
            (loss / job.degrees.dp).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        moved = [
            name
            for name, param in params.items()
            if not torch.equal(param.detach().to_local(), before[name])
        ]
        still = [
            name for name, param in params.items() if name not in moved and param.to_local().numel()
        ]
        states = {names_by_param[param] for param in optimizer.state}
        return lost, wrong, losses, still, states == set(params)

    for lost, wrong, losses, still, has_all_states in run_ranks(4, rank_main):
        assert lost == [], "attributes set before sharding are gone"
        assert wrong == []
        assert losses[2] < losses[0] - 0.1, (
            "the optimizer made before materialization does not train"
        )
        # Experts that got no token have a zero gradient; everything else must move.
        assert [name for name in still if "experts" not in name] == []
        assert has_all_states


@pytest.mark.parametrize("mesh", ["FSDP4", "TP2xEP4"])
def test_buffer_with_an_explicit_device_survives_bit_for_bit_and_expert_bias_is_finite(
    run_ranks, checked, meshes, mesh
):
    job = checked(meshes[mesh])
    # A denormal, a negative zero, the largest float: anything but a copy of the bits would show.
    history = torch.tensor([1e-45, -0.0, 3.4028235e38, 0.1])
    bias = torch.linspace(-1, 1, 8) / 3

    def rank_main():
        def add_buffers(model):
            gate = model.model.layers[0].mlp.gate
            with torch.device("meta"):  # as inside build_decoder; the explicit device wins
                gate.register_buffer("history", torch.empty(4, device="cpu"), persistent=False)
                gate.register_buffer("expert_bias", torch.empty(8, device="cpu"))
            gate.history.copy_(history)
            gate.expert_bias.copy_(bias)

        model = build_sharded(job, add_buffers)
        first, second = (layer.mlp.gate for layer in model.model.layers)
        objects = first.history, first.expert_bias
        pointers = [buffer.data_ptr() for buffer in objects]
        plan = materialize(model, "cpu", seed=SEED)
        same = [objects[0] is first.history, objects[1] is first.expert_bias]
        unmoved = [buffer.data_ptr() for buffer in objects] == pointers
        kept = {entry.fqn for entry in plan.entries if isinstance(entry.source, Keep)}
        return (
            [*same, unmoved],
            kept,
            first.history.clone(),
            first.expert_bias.clone(),
            second.expert_bias.clone(),
        )

    for same, kept, got_history, got_bias, other_bias in run_ranks(4, rank_main):
        assert same == [True, True, True]
        assert kept == {"model.layers.0.mlp.gate.history", "model.layers.0.mlp.gate.expert_bias"}
        assert torch.equal(got_history.view(torch.int32), history.view(torch.int32))
        assert torch.equal(got_bias.view(torch.int32), bias.view(torch.int32))
        assert torch.equal(other_bias, torch.zeros(8)), "filled from its declaration, not NaN"


@pytest.mark.parametrize("mesh", ["TP2xFSDP2", "TP2xEP2", "EP4"])
def test_spec_dtype_is_local_dtype_with_bfloat16_mixed_precision_on_an_moe(
    run_ranks, checked, meshes, mesh
):
    """torchtitan #1355: the spec said float32, the data was bfloat16, and the grouped GEMM
    failed.
    """
    job = checked(
        meshes[mesh], "--training.mixed_precision_param=bfloat16", "--training.local_batch_size=1"
    )
    # before, the unsharded spec kept float32 (pytorch#183805)
    spec_follows = torch.__version__ >= "2.13"

    def rank_main():
        trainer = assemble(job)
        seen = {}

        def look(name):
            def hook(module, args):
                for leaf, param in module.named_parameters(recurse=False):
                    local = param.to_local() if isinstance(param, DTensor) else param
                    read = module.read if isinstance(module, Experts) else None
                    dtypes = (
                        (read(param).dtype,) * 2
                        if isinstance(read, ExpertCopies)
                        else (param.dtype, local.dtype)
                    )
                    seen.setdefault(f"{name}.{leaf}", []).append(dtypes)

            return hook

        for name, module in trainer.model.named_modules():
            module.register_forward_pre_hook(look(name))  # after FSDP's, so parameters are gathered
        result = trainer.parts.stepper.train_step(trainer.parts.loader.micro_batches(0))
        params = list(trainer.model.named_parameters())
        sharded = [(p.dtype, p.to_local().dtype) for _, p in params]
        return (
            result.loss.item(),
            result.grad_norm.item(),
            seen,
            sharded,
            {name for name, _ in params},
        )

    for loss, grad_norm, seen, sharded, names in run_ranks(4, rank_main):
        assert 4 < loss < 7 and 0 < grad_norm < 100  # ln(310) = 5.7
        assert set(sharded) == {(torch.float32, torch.float32)}
        assert seen.keys() == names, "every parameter was looked at while it was gathered"
        for name, dtypes in seen.items():
            for spec, local in dtypes:
                assert local == torch.bfloat16, name
                assert spec == local or not spec_follows, name


@pytest.mark.parametrize("cast", ["training.dtype", "model.to"])
def test_inv_freq_stays_float32_under_a_bfloat16_model(run_ranks, checked, meshes, cast):
    job = checked(meshes["TP2xEP2"])
    expected = reference_weights(job)

    def rank_main():
        dims = ParallelDims.build(job.degrees, "cpu")
        model = build_decoder(
            job.model_config, torch.bfloat16 if cast == "training.dtype" else torch.float32
        )
        if cast == "model.to":
            model = model.to(torch.bfloat16)
        parallelize(model, job.job, dims, "cpu")
        plan = materialize(model, "cpu", seed=SEED)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())
        regions = {entry.fqn: entry.region.slices for entry in plan.entries}
        weights = {
            name: (p.detach().to_local(), regions[name]) for name, p in model.named_parameters()
        }
        return dtypes, buffers, weights

    for dtypes, buffers, weights in run_ranks(4, rank_main):
        assert set(dtypes.values()) == {torch.bfloat16}
        assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32
        assert torch.equal(
            buffers["model.rotary_emb.inv_freq"], expected["model.rotary_emb.inv_freq"]
        )
        assert buffers["model.layers.0.mlp.gate.expert_bias"].dtype == torch.float32
        assert buffers["model.layers.0.mlp.gate.tokens_per_expert"].dtype == torch.int64
        for name, (local, region) in weights.items():  # the same draws, rounded once
            assert torch.equal(local, expected[name][region].to(torch.bfloat16)), name


def _forget_buffer(model):
    model.model.layers[1].register_buffer("scale", torch.empty(3, device="meta"))
    return []


def _forget_parameter(model):
    declare_for(model.model.layers[0].mlp.experts, {"gate_up_proj": Init(Normal(std=0.02))})
    return []


def _two_declarations(model):
    declare_for(model, {"model.norm.weight": Init(Ones())})
    return []


def _two_claims(model):
    return [{"lm_head.weight": Init(Zeros())}, {"lm_head.*": Init(Ones())}]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_forget_buffer, ["model.layers.1.scale: buffer (3,) of ", "DecoderLayer has no source"]),
        (
            _forget_parameter,
            [
                "model.layers.0.mlp.experts.down_proj: parameter (8, 64, 32) of ",
                "Experts has no source",
            ],
        ),
        (
            _two_declarations,
            ["model.norm.weight: two sources", "Decoder and 'init", "RMSNorm 'model.norm'"],
        ),
        (
            _two_claims,
            ["lm_head.weight: two sources, 'init constant()'", "'init constant(value=1)'"],
        ),
    ],
)
def test_forgotten_tensor_or_second_source_is_the_same_one_error_on_all_ranks(
    run_ranks, checked, meshes, spoil, words
):
    def rank_main():
        sources = []
        model = build_sharded(
            checked(meshes["TP2xEP2"]), lambda model: sources.append(spoil(model))
        )
        with pytest.raises(PlanError) as raised:
            materialize(model, "cpu", sources[0])
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]), (
            "nothing was allocated"
        )
        return str(raised.value)

    (message,) = set(run_ranks(4, rank_main))
    assert "\n" not in message, "one problem, one line"
    for word in words:
        assert word in message
