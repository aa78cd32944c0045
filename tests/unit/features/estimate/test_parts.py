"""Parts of a step: FLOPs, bytes, launches and synchronizations counted by hand, and the time that
follows.
"""

from collections import Counter
from dataclasses import replace

import pytest
from planned import checked

from titanlite.config.parallelism import Degrees
from titanlite.features.choice.hardware import get_hardware
from titanlite.features.estimate import estimate, tracker
from titanlite.features.estimate.estimate import step_time
from titanlite.features.estimate.operators import Call, Work
from titanlite.features.estimate.trace import trace_step
from titanlite.features.estimate.tracker import Kind
from titanlite.models.families import families

PARALLELISM = "--parallelism."
MODE = "--activation_checkpoint.mode="


def trace(world_size, *overrides):
    return trace_step(checked(world_size, LAYERS, *overrides))


def experts_over(ranks):
    return f"{PARALLELISM}expert_parallel_degree={ranks}"


def by_part(found):
    parts = {}
    for kind, work in found.step_work():
        name = kind.part or f"{kind.call.rate} over {kind.group}"
        parts[name] = parts.get(name, Work()) + work
    return parts


T, S, D, V, LAYERS = 64, 32, 64, 310, 2  # tokens, of a row, width, vocabulary
HEADS, KEY_HEADS, WIDTH = 4, 2, 16
E, TOP_K, INNER = 8, 2, 32
ROWS = T * TOP_K
# of 64 tokens, to each of two ranks: those with an expert of its 4, all but 4 * 3 / (8 * 7)
COPIES = 50
DENSE = D * WIDTH * (2 * HEADS + 2 * KEY_HEADS)  # elements of a layer's projections
EXPERTS = 3 * INNER * D  # of an expert


@pytest.mark.parametrize("mode", ["none", "full"])
def test_products_and_collectives_are_those_of_the_layers(mode):
    parts = by_part(trace(2, experts_over(2), MODE + mode))
    again = mode == "full"
    # The router's among them: backward multiplies the two halves of a float32 gradient.
    router = (5 + again) * D * E
    assert parts[tracker.DENSE].flops == ((3 + again) * DENSE + router) * 2 * T * LAYERS
    # Two products over all pairs of a row in forward and five in backward, half of them above the
    # diagonal.
    assert (
        parts[tracker.ATTENTION].flops
        == (2 * (1 + again) + 5) * 2 * T * S * HEADS * WIDTH // 2 * LAYERS
    )
    # A recomputation ends before the second product. Backward has two kernels for SwiGLU, and one
    # for each product, with a copy of rows before those of weights.
    assert parts[tracker.GROUPED].flops == (9 + 2 * again) * 2 * ROWS * INNER * D * LAYERS
    assert parts[tracker.GROUPED].launches == (2 + again + 5 + 2) * LAYERS
    assert parts[tracker.HEAD].flops == 3 * 2 * T * D * V
    # Tokens and results there and back, of which a recomputation needs tokens. The gradient of the
    # tokens is overlapped, and where the layer is computed again that of the results too. Small:
    # counts of copies and rows, the experts' numbers, and the routers' weights with their
    # gradients.
    copies, small = 2 * COPIES * D * 2, 2 * 2 * 4 + 2 * COPIES * TOP_K * (8 + 4 + 4)
    assert parts["all_to_all over ep"] == Work(
        nbytes=(3 * copies + small) * LAYERS, launches=7 * LAYERS
    )
    overlapped = parts["overlapped all_to_all over ep"]
    assert overlapped == Work(nbytes=(1 + again) * copies * LAYERS, launches=(1 + again) * LAYERS)
    # Each layer, the embedding, and the head with its norm: gathered in two bytes, reduced in four.
    sharded = LAYERS * (DENSE + 2 * D + 2 * WIDTH + E * D) + 2 * V * D + D
    assert parts["all_gather over dp_shard"].nbytes >= 2 * sharded
    assert parts["reduce_scatter over dp_shard"] == Work(nbytes=4 * sharded, launches=LAYERS + 2)
    # The norm reads a number of each parameter, clipping reads and writes one; AdamW reads four and
    # writes three. Some scalars are in it.
    here = sharded // 2 + LAYERS * E // 2 * EXPERTS
    assert parts[tracker.OPTIMIZER].nbytes == pytest.approx(40 * here, rel=0.02)
    assert parts[tracker.FSDP].nbytes > 0 and parts[tracker.ELEMENTWISE].nbytes > 0


def waits(found, dense_layers=0):
    """Return how often the host waits in a step, and how often it may: once in each forward of an
    MoE layer.
    """
    return found.total.syncs, (len(found.layers) - dense_layers) * found.micro_batches


@pytest.mark.parametrize("family", families())
def test_steps_of_every_family_are_traced_on_the_branches_of_cuda(family):
    """Only expert parallelism makes the host wait, once in each forward of an MoE layer, not in its
    recomputation.
    """
    sizes = families()[family].presets["debug"]
    options = (f"--model.name={family}", "--moe.aux_loss_coeff=0")
    degree = 2 if sizes.num_experts else 1
    syncs, moe_layers = waits(
        trace(2, *options, experts_over(degree), MODE + "full"), sizes.num_dense_layers
    )
    assert syncs == (moe_layers if degree > 1 else 0)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, ("tensor_parallel_degree=2",)),
        (2, ("context_parallel_degree=2",)),
        (2, ("pipeline_parallel_degree=2",)),
        (4, ("data_parallel_replicate_degree=2", "expert_parallel_degree=2")),
        (4, ("fsdp_once_per_step=true", "expert_parallel_degree=4")),
        (4, ("pipeline_parallel_degree=2", "expert_parallel_degree=2")),
    ],
)
def test_steps_of_every_mesh_wait_for_the_split_sizes_alone(world_size, options):
    found = trace(world_size, experts_over(1), *(PARALLELISM + option for option in options))
    syncs, moe_layers = waits(found)
    assert syncs == (moe_layers if "expert_parallel_degree" in options[-1] else 0)


def test_collectives_of_fsdp_are_exposed_where_they_take_longer_than_the_kernels_next_to_them():
    h100 = get_hardware("h100")
    millisecond = int(h100.rate("memory") * 1e-3)
    gathered = int(8 / 7 * h100.intra_node_bytes_s * estimate.LINKS * 1e-3)

    def kind(phase, group, call, part=""):
        return Kind(0, phase, part, group, Call(call))

    work = {
        kind("forward", "", "memory", tracker.ELEMENTWISE): Work(nbytes=3 * millisecond),
        kind("forward", "dp_shard", "all_gather"): Work(nbytes=5 * gathered),
        kind("forward", "ep", "all_to_all"): Work(nbytes=gathered),
        kind("backward", "", "memory", tracker.ELEMENTWISE): Work(nbytes=7 * millisecond, syncs=10),
        kind("backward", "dp_shard", "all_gather"): Work(nbytes=2 * gathered),
    }
    node = list(range(8))
    groups = {"dp_shard": node, "ep": node}
    base = replace(trace(2), work=work, ranks=groups, repeats=(2,))
    time = step_time(base, Degrees(dp_shard=8, ep=8), h100)
    exposed = {name: round(part.exposed_s * 1e3, 3) for name, part in time.parts.items()}
    hidden = Counter(
        {name: round(part.hidden_s * 1e3, 3) for name, part in time.parts.items() if part.hidden_s}
    )
    assert exposed == {
        tracker.ELEMENTWISE: 20.0,
        "all_to_all over ep": 2.0,
        # of a forward's 5 ms, 4 run next to kernels and the exchange
        "all_gather over dp_shard": 2.0,
        "host synchronizations": 2.0,
    }
    assert hidden == {"all_gather over dp_shard": 12.0}
    assert time.expected_s == pytest.approx(26e-3, rel=1e-6)


def test_a_product_takes_the_time_of_its_flops_or_of_its_bytes():
    h100 = get_hardware("h100")
    long, small = int(h100.rate("dense") * 1e-3), int(h100.rate("memory") * 2e-3)
    work = {
        Kind(0, "forward", tracker.DENSE, "", Call("dense", long, small)): Work(
            flops=3 * long, nbytes=3 * small
        )
    }
    assert step_time(replace(trace(2), work=work), Degrees(), h100).expected_s == pytest.approx(
        6e-3, rel=1e-6
    )
