"""Settings that are chosen: which, for which batch, and which ones are left as they are written."""

from dataclasses import replace

import pytest
import torch

from titanlite.assemble import build_unsharded
from titanlite.checkpoint.train_state import Progress
from titanlite.config.load import CODE, Reader
from titanlite.config.parallelism import CHOSEN, resolve_global_batch_size
from titanlite.config.settings import get_value
from titanlite.features.choice.at_start import choose_for, describe_model
from titanlite.features.choice.choose import describe, find_all, find_hardware, keep_choice, take
from titanlite.features.choice.hardware import get_hardware
from titanlite.metrics.run_folder import get_identity
from titanlite.preflight import check

MOE = ("--model.name=qwen3_moe", "--model.flavor=30B-A3B")
LONG = ("--training.seq_len=4096",)
H100, H200 = get_hardware("h100"), get_hardware("h200")


def checked(*overrides, ranks=8):
    reader = Reader()
    reader.read_arguments(["--config", CODE, *MOE, "--data.dataset=stdlib", *overrides])
    return check(reader.finish(None), ranks)


@pytest.mark.parametrize(
    ("overrides", "ranks", "hardware", "expected"),
    [
        # two sequences at a time, nothing computed again
        (["--training.global_batch_size=16"], 8, H100, "none"),
        # four times as many tokens have room without recomputation on 141 GB, and not on 80 GB
        ([*LONG, "--training.global_batch_size=32"], 8, H200, "none"),
        ([*LONG, "--training.global_batch_size=32"], 8, H100, "keep_attention"),
    ],
)
def test_the_choice(overrides, ranks, hardware, expected):
    job = checked(*overrides, ranks=ranks)
    choice = choose_for(job, hardware, build_unsharded)
    assert choice == choose_for(job, hardware, build_unsharded), "every rank may compute it"
    assert choice.fits and choice.nbytes < 0.97 * hardware.usable_bytes
    assert choice.values["activation_checkpoint.mode"] == expected
    taken = take(job, choice)
    training, before = taken.job.training, job.job.training
    assert not taken.unwritten and training.global_batch_size == before.global_batch_size
    assert training.global_batch_size % (training.local_batch_size * taken.degrees.dp) == 0
    assert f"about {choice.rate:,.0f} tokens/s per GPU" in describe(choice, hardware)


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_ranks_of_one_sequence_are_as_busy_as_ranks_of_different_ones(axis):
    """Two sequences on two ranks cost a rank nearly what one sequence on one rank does."""
    settings = [f"--{key}=1" for key in CHOSEN if key.startswith("parallelism")]
    settings += ["--training.seq_len=8192", "--activation_checkpoint.mode=full"]
    found = []
    for ranks in (1, 2):
        split = f"--parallelism.{axis}_parallel_degree={ranks}"
        one = checked(*settings, split, f"--training.local_batch_size={ranks}")
        found += find_all(one, describe_model(one, build_unsharded), H100, batch=8)
    alone, together = found
    assert together.rate == pytest.approx(alone.rate, rel=0.1)
    assert together.nbytes == pytest.approx(alone.nbytes, rel=0.1)


def with_adapters(job, **options):
    lora = replace(job.job.lora, rank=8, **options)
    return replace(job, job=replace(job.job, lora=lora))


def test_adapters_of_a_quantized_model_are_chosen_to_fit():
    """Four sequences take 117 GB without recomputation, by their traced plan."""
    job = with_adapters(checked(*LONG, ranks=1), base_dtype="nf4")
    choice = choose_for(job, H100, build_unsharded, batch=16)
    assert choice.fits and choice.values["training.local_batch_size"] == 2
    written = replace(job, unwritten=("training.local_batch_size",))
    choice = choose_for(written, H200, build_unsharded, batch=4)
    assert choice.values == {"training.local_batch_size": 4}
    assert choice.nbytes == pytest.approx(116.8e9, rel=0.05)


def test_frozen_weights_need_no_copies_and_quantized_ones_are_as_wide():
    job = checked(ranks=1)
    whole, plain, encoded = (
        describe_model(one, build_unsharded)
        for one in (job, with_adapters(job), with_adapters(job, base_dtype="nf4"))
    )
    assert whole.dense.copied == whole.dense.gathered and whole.unfused_width == 0
    for sizes in (plain, encoded):
        assert sizes.dense.copied == 2 * sizes.dense.trained
        assert sizes.attention_width == whole.attention_width > 0
        assert sizes.unfused_width > sizes.hidden_size


def test_moments_in_two_bytes_take_half_the_memory():
    nbytes = {}
    for dtype in ("float32", "bfloat16"):
        one = checked(f"--optimizer.state_dtype={dtype}", ranks=1)
        sizes = describe_model(one, build_unsharded)
        nbytes[dtype] = min(each.nbytes for each in find_all(one, sizes, H100, batch=1))
    trained = sizes.dense.trained + sizes.experts.trained + sizes.outside.trained
    assert nbytes["float32"] - nbytes["bfloat16"] == pytest.approx(2 * 2 * trained)


def test_a_batch_of_the_ranks_sequences_stays_that_of_the_data():
    """With `global_batch_size` = -1 a step has the sequences of all ranks, whatever is chosen."""
    one = checked("--training.global_batch_size=-1")
    found = [*find_all(one, describe_model(one, build_unsharded), H100, batch=16)]
    batches = set()
    for choice in found:
        taken = take(one, choice)
        batches.add(resolve_global_batch_size(taken.job, taken.degrees.dp))
    assert found and batches == {16}


WRITTEN = {
    "parallelism.data_parallel_replicate_degree": 2,
    "parallelism.context_parallel_degree": 2,
    "parallelism.expert_parallel_degree": 2,
    "training.local_batch_size": 1,
    "activation_checkpoint.mode": "full",
}


@pytest.mark.parametrize("key", CHOSEN)
def test_written_settings_win(key):
    job = checked(f"--{key}={WRITTEN[key]}", "--training.global_batch_size=16")
    assert set(job.unwritten) == set(CHOSEN) - {key}
    choice = choose_for(job, H100, build_unsharded)
    assert key not in choice.values
    assert get_value(take(job, choice).job, key) == WRITTEN[key]


def test_the_batch_of_a_step_is_kept_and_a_larger_one_named():
    """One sequence for each rank where none is set; with more, weights are gathered less often."""
    choice = choose_for(checked(), H100, build_unsharded)
    assert choice.batch == 8 and choice.values["training.local_batch_size"] == 1
    assert choice.larger.batch > 8
    assert choice.larger.rate > 1.15 * choice.rate
    choice = choose_for(checked("--training.global_batch_size=512"), H100, build_unsharded)
    assert choice.larger is None


def test_what_fits_nowhere_is_as_small_as_it_can_be():
    choice = choose_for(checked(ranks=2), H100, build_unsharded)
    assert not choice.fits and choice.nbytes > H100.usable_bytes
    assert "PERHAPS TOO MUCH" in describe(choice, H100)


def test_a_run_that_resumes_keeps_its_choice():
    job = checked("--training.global_batch_size=16")
    chosen = take(job, choose_for(job, H100, build_unsharded))
    progress = Progress(1, 16, "", 8, {}, identity=get_identity(chosen.job))
    kept = keep_choice(job, progress)
    assert take(job, kept) == chosen
    assert keep_choice(job, replace(progress, world_size=4)) is None, "other ranks choose anew"
    other = checked("--training.global_batch_size=8")
    assert keep_choice(other, progress) is None, "two at a time on 8 ranks are no batch of 8"
    assert keep_choice(job, replace(progress, identity={})) is None


def test_nothing_is_chosen_on_cpu():
    assert find_hardware(torch.device("cpu")) is None
    job = checked()
    assert {key: get_value(job.job, key) for key in CHOSEN} == CHOSEN
