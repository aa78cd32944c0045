"""What a training step promises: clipping, skipped updates, counts, determinism, compilation."""

import math
import shutil
from functools import partial

import pytest
import torch
from traced_layers import TORCH_COMPILE_WARNINGS, Graphs

import titanlite.train_step
from tests.functional.conftest import backward_once, take_step, train_steps, weekly
from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import Batch
from titanlite.distributed.grads import clip_grad_norms
from titanlite.materialize.layout import local_of
from titanlite.optim.schedule import Schedule

FULL_AC = "--activation_checkpoint.mode=full"
TOKENS = torch.arange(4 * 32).view(4, 32) * 7 % 310


def snapshot(trainer):
    """This rank's weights, buffers and optimizer states, copied."""
    found = dict([*trainer.model.named_parameters(), *trainer.model.named_buffers()])
    for i, state in enumerate(trainer.parts.stepper.optimizer.state.values()):
        found |= {f"state {i}.{key}": value for key, value in state.items()}
    return {
        name: local_of(tensor).clone()
        for name, tensor in found.items()
        if "tokens_per_expert" not in name
    }


def differing(before, after):
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


# --- gradients


@pytest.mark.parametrize("mesh", ["HSDP2x2xEP2", weekly("DDP4")])
def test_replicas_are_summed_once_a_step_however_many_micro_batches(
    run_ranks, checked, meshes, monkeypatch, mesh
):
    degrees, real = meshes[mesh], torch.distributed.all_reduce

    def count(local_batch_size):
        elements = []
        overrides = [
            f"--training.local_batch_size={local_batch_size}",
            "--training.global_batch_size=16",
        ]
        configuration = checked(degrees, *overrides)
        trainer = assemble(configuration)

        def counted(tensor, **options):
            elements.append(tensor.numel())
            real(tensor, **options)

        monkeypatch.setattr(torch.distributed, "all_reduce", counted)
        for step in range(2):
            micro_batches = trainer.parts.loader.micro_batches(step)
            elements.clear()
            trainer.parts.stepper.train_step(micro_batches)
        left = [name for name, param in trainer.model.named_parameters() if param.grad is not None]
        trainer.metrics.close()
        return len(micro_batches), sum(elements), left

    for (few, once, _), (many, in_all, left) in run_ranks(4, lambda: (count(4), count(1))):
        assert (few, many, left) == (16 // degrees.dp // 4, 16 // degrees.dp, [])
        assert in_all == once > 0


@pytest.mark.parametrize("mesh", ["HSDP2xTP2xEP2", "CP2xTP2xEP4"])
def test_clip_grad_norm_scales_all_shards_to_the_norm_of_one_process(
    run_ranks, checked, meshes, mesh
):
    def build(degrees):
        trainer = assemble(checked(degrees, f"--training.local_batch_size={8 // degrees.dp}"))
        backward_once(trainer)
        return list(trainer.model.parameters())

    def one_process():
        return torch.nn.utils.get_total_norm([param.grad for param in build(Degrees())])

    (expected,) = run_ranks(1, one_process)

    def rank_main():
        params = build(meshes[mesh])
        before = [local_of(param.grad).clone() for param in params]
        only_computed = clip_grad_norms({"": params}, 0.0)[0]
        unclipped = clip_grad_norms({"": params}, 2 * expected.item())[0]
        untouched = all(
            torch.equal(local_of(p.grad), grad) for p, grad in zip(params, before, strict=True)
        )
        norm = clip_grad_norms({"": params}, 0.5)[0]
        factor = 0.5 / (norm + 1e-6)
        for param, grad in zip(params, before, strict=True):
            torch.testing.assert_close(local_of(param.grad), grad * factor, rtol=1e-6, atol=0)
        return only_computed, unclipped, untouched, norm, clip_grad_norms({"": params}, 0.5)[0]

    for only_computed, unclipped, untouched, norm, after in run_ranks(4, rank_main):
        assert untouched, "max_norm 0 and a norm below max_norm leave the gradients alone"
        for value in (only_computed, unclipped, norm):
            # Ranks add float32 numbers in another order; see test_parity_ladder.py.
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
        assert after.item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_reaches_the_optimizer(warm_run):
    """eps = 1 is far above the gradients, so AdamW acts as momentum: clipped to norm 1e-4, the
    weights hardly move.
    """
    overrides = [
        "--training.local_batch_size=8",
        "--optimizer.eps=1.0",
        "--optimizer.weight_decay=0",
    ]
    start = warm_run(Degrees(), *overrides, steps=0)[0].weights
    moved, norms = [], []
    for max_norm in ("1e-4", "0"):
        (run,) = warm_run(Degrees(), f"--training.max_norm={max_norm}", *overrides, steps=2)
        names = [name for name in start if name.endswith("weight")]
        moved.append(
            sum((run.weights[name] - start[name]).square().sum() for name in names).sqrt().item()
        )
        norms.append(run.grad_norms[0])
    assert norms[0] == norms[1] > 0.1, "the reported norm is the one before clipping"
    assert 0 < moved[0] < 0.01 * moved[1]


# --- skipped steps


def poison_step(monkeypatch, step, value):
    """Let one gradient element on rank 1 be `value` in optimizer step `step` (1-based)."""
    original, calls = titanlite.train_step.clip_grad_norms, []

    def poisoned(groups, max_norm, *rest):
        params = [param for group in groups.values() for param in group]
        calls.append(None)
        if len(calls) == step and torch.distributed.get_rank() == 1:
            local_of(params[3].grad).view(-1)[0] = value
        return original(groups, max_norm, *rest)

    monkeypatch.setattr(titanlite.train_step, "clip_grad_norms", poisoned)


@pytest.mark.parametrize(
    ("mesh", "implementation", "value", "name"),
    [
        ("TP2xEP2", "fused", math.nan, "AdamW"),
        weekly("HSDP2x2", "for-loop", -math.inf, "AdamW"),
        weekly("HSDP2xTP2xEP2", "fused", math.nan, "Muon"),
        ("FSDP2", "foreach", math.inf, "Muon"),
    ],
)
def test_step_with_a_non_finite_gradient_changes_nothing_on_any_rank(
    run_ranks, checked, meshes, monkeypatch, mesh, implementation, value, name
):
    skip = ["--training.on_nonfinite=skip", "--training.max_nonfinite_steps=1000"]
    skip.append(f"--training.local_batch_size={8 // meshes[mesh].dp}")
    job = checked(
        meshes[mesh],
        f"--optimizer.name={name}",
        f"--optimizer.implementation={implementation}",
        *skip,
    )
    poison_step(monkeypatch, 2, value)

    def rank_main():
        trainer = assemble(job)
        take_step(trainer, 0)
        trainer.check_finite()
        before = snapshot(trainer)
        bad = take_step(trainer, 1)
        changed = differing(before, snapshot(trainer))
        take_step(trainer, 2)
        moved = differing(before, snapshot(trainer))
        found = trainer.parts.stepper.finite_guard.look()
        return (
            bad.grad_norm.isfinite().item(),
            changed,
            len(moved),
            len(before),
            (found.first_new, found.total),
        )

    ranks = run_ranks(meshes[mesh].world_size, rank_main)
    for finite, changed, num_moved, num_tensors, found in ranks:
        assert not finite
        assert changed == [], (
            "weights, biases and optimizer states must stay as they are, bit for bit"
        )
        assert num_moved > 0.9 * num_tensors - 2, "and the next step must change them again"
        assert found == (2, 1)


# --- counts


def test_validation_touches_neither_counts_nor_weights(run_ranks, checked, meshes):
    job = checked(meshes["TP2xEP2 only"], "--validation.enable=true", "--validation.steps=2")

    def rank_main():
        trainer = assemble(job)
        backward_once(trainer)
        trainer.parts.stepper.balancer.accumulate()
        before, counts = snapshot(trainer), trainer.parts.stepper.balancer.counts.clone()
        gates = [moe.gate.tokens_per_expert.clone() for moe in trainer.model.moe_layers().values()]
        losses = [trainer.validate()[0] for _ in range(2)]
        gates_after = [moe.gate.tokens_per_expert for moe in trainer.model.moe_layers().values()]
        same_gates = all(torch.equal(a, b) for a, b in zip(gates, gates_after, strict=True))
        same = same_gates and torch.equal(trainer.parts.stepper.balancer.counts, counts)
        return (
            losses,
            counts.sum().item(),
            same,
            differing(before, snapshot(trainer)),
            trainer.model.training,
        )

    results = run_ranks(2, rank_main)
    assert len({result[0][0] for result in results}) == 1, "all ranks report one loss"
    for losses, counted, same, changed, training in results:
        assert losses[0] == losses[1] == pytest.approx(math.log(310), rel=0.02)
        assert counted > 0 and same and changed == [] and training


def test_padding_is_neither_counted_nor_trained(run_ranks, checked, meshes):
    """The token ids under padding do not change the loss, the gradient norm or a count. Routers
    balance the tokens of prompts too: which tokens have labels changes neither the balance losses
    nor their gradients, which are all that counts if the coefficient is large.
    """
    degrees = meshes["TP2xEP2"]
    job = checked(degrees, FULL_AC, "--moe.aux_loss_coeff=0.01", "--moe.z_loss_coeff=0.001")
    balance = checked(degrees, "--moe.aux_loss_coeff=1e6")

    def step(job, filler=0, num_labels=32):
        tokens, positions = TOKENS[:2].clone(), torch.arange(32).expand(2, -1).clone()
        documents, labels = torch.zeros_like(tokens), TOKENS[1:3].clone()
        labels[:, num_labels:] = -100
        for row, length in enumerate((13, 27)):
            tokens[row, length:], labels[row, length:], documents[row, length:] = filler, -100, -1
        trainer = assemble(job)
        result = trainer.parts.stepper.train_step([Batch(tokens, labels, positions, documents)])
        trainer.metrics.close()
        values = (result.loss, result.grad_norm, result.aux_loss)
        return [value.item() for value in values], result.tokens_per_expert.tolist()

    def rank_main():
        return step(job), step(job, filler=200), step(balance), step(balance, num_labels=4)

    for (values, counts), (others, other_counts), *balanced in run_ranks(4, rank_main):
        # Rows are grouped by expert together with the padding, so float32 sums may be blocked
        # differently.
        assert others == pytest.approx(values, rel=1e-6)
        assert counts == other_counts
        assert [sum(layer) for layer in counts] == [(13 + 27) * 2 * degrees.dp] * 2, (
            "2 experts per real token"
        )
        ((_, *whole), whole_counts), ((_, *few), few_counts) = balanced
        assert few == pytest.approx(whole, rel=1e-3) and few_counts == whole_counts
        # Each of the two layers has a balance loss of at least its coefficient for every token;
        # with 8 experts of which 2 are chosen, it has at most 4 times that.
        assert few[1] == whole[1] and 2e6 <= whole[1] <= 4 * 2e6


# --- compiled layers


class TestCompile:
    pytestmark = TORCH_COMPILE_WARNINGS

    @pytest.fixture(autouse=True)
    def imports(self):
        """Import before the fork the modules that every rank would import for its first graph,
        which takes seconds.
        """
        import networkx  # noqa: F401
        import torch._functorch.partitioners
        import torch._inductor.compile_fx  # noqa: F401

    @pytest.mark.parametrize(
        ("degrees", "checkpointing"),
        [
            (Degrees(), "full"),
            (Degrees(tp=2, ep=2), "selective"),
            # experts are a unit of FSDP
            weekly(Degrees(cp=2), "full"),
            weekly(Degrees(pp=2), "selective"),
        ],
        ids=str,
    )
    def test_traced_moe_layers_give_the_same_loss(
        self, checked, run_ranks, monkeypatch, degrees, checkpointing
    ):
        """Tracing alone, without code generation, runs the same operations, except for their order.
        A value that changes in every step takes one more graph.

        Every layer of every forward runs compiled, and all layers share their graphs. A layer has
        one graph, or one before and one after the experts if these are an FSDP unit or receive
        tokens of other ranks.
        """
        settings = [
            "--training.local_batch_size=4",
            f"--activation_checkpoint.mode={checkpointing}",
            "--moe.aux_loss_coeff=0.01",
            "--moe.z_loss_coeff=0.001",
        ]
        monkeypatch.setattr(Schedule, "z_loss_coeff", lambda schedule, step: 0.001 * (step + 1))
        steps = 3 if degrees == Degrees() else 1
        plain = checked(degrees, *settings)
        compiled = checked(degrees, *settings, "--compile.enable=true")
        graphs = Graphs()
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs.trace))

        def rank_main():
            return [train_steps(assemble(job), steps) for job in (plain, compiled)], graphs

        ranks = run_ranks(degrees.world_size, rank_main)
        for (one, traced), _ in ranks:
            assert traced.losses == pytest.approx(one.losses, rel=1e-5)
            assert traced.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
            assert traced.tokens_per_expert == one.tokens_per_expert
        graphs = ranks[0][1]
        layers = 2 // degrees.pp
        micro_batches = plain.job.training.global_batch_size // (4 * degrees.dp)
        forwards = layers * micro_batches
        if degrees.experts_on_own_mesh:
            assert graphs.made >= 2 and graphs.called >= graphs.made * forwards
        else:
            assert graphs.made <= 2
            assert graphs.called == steps * forwards * (2 if checkpointing == "full" else 1)

    @pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("c++")), reason="the inductor needs a C++ compiler"
    )
    @pytest.mark.slow
    @pytest.mark.full
    def test_compiled_layers_give_the_same_loss(self, train_run, monkeypatch, tmp_path):
        """The inductor fuses and reorders float32 arithmetic, which changes results by 1e-5
        relative.
        """
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        # a forked rank cannot start a pool of compilers
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        small = ["--training.local_batch_size=8", "--model.overrides.num_layers=1"]
        (plain,) = train_run(Degrees(), *small, steps=2)
        (compiled,) = train_run(Degrees(), *small, "--compile.enable=true", steps=2)
        assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
        assert compiled.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
        assert list(tmp_path.rglob("*.so")), "nothing was compiled"
