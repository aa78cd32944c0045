"""`python -m titanlite plan`: what it prints, and what it refuses."""

import os
import re
import resource
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from files import read_table

from tests.loading import add_to_hub_cache
from titanlite.__main__ import main
from titanlite.features.estimate import estimate, proposals
from titanlite.features.estimate.cli import plan_run, read_request
from titanlite.features.estimate.proposals import propose, sweep
from titanlite.features.estimate.trace import trace_step
from titanlite.models.families import families

ROOT = Path(__file__).parents[4]
TINY = (
    "--config",
    str(ROOT / "configs" / "qwen3_moe.toml"),
    "--model.flavor=debug",
    "--model.overrides.num_layers=3",
    "--model.overrides.vocab_size=310",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.global_batch_size=-1",
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.expert_parallel_degree=2",
    "--activation_checkpoint.mode=none",
)


@pytest.fixture(scope="module", autouse=True)
def each_trace_once():
    """Tests ask for the same plans again and again. Traces depend on nothing but these
    arguments.
    """
    found = {}

    def trace_once(*args, **options):
        key = repr((args, options))
        if key not in found:
            found[key] = trace_step(*args, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "trace_step", trace_once)
        yield


@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.full)])
def test_what_to_change_shows_the_promised_figures(capsys, monkeypatch, is_small):
    """Each proposal on the command line, and its plan has the memory and the rate that were
    promised. Every second setting is tried, except in the weekly case.
    """
    if is_small:
        candidates = proposals._candidates
        monkeypatch.setattr(proposals, "_candidates", lambda base: [*candidates(base)][::2])
    base = [*TINY, "--gpus=4xh100", "--reserved-gib=0"]
    if is_small:
        base.append(f"--memory-gib={0.97 * plan_run(base).estimate.memory.total / 2**30}")
    planned = plan_run(base)
    found = list(propose(planned, partial(plan_run, base)))
    code = main(["plan", *base])
    lines = capsys.readouterr().out.splitlines()
    assert code == is_small and planned.fits == (not is_small)
    first = 1 + [line.split() for line in lines].index(["memory", "expected", "to", "change"])
    assert len(found) >= 1 and lines[first + len(found)] == ""
    for line, promised in zip(lines[first:], found, strict=False):
        assert promised.fits and " ".join(promised.arguments) in line
        assert main(["plan", *base, *promised.arguments, "--no-proposals"]) == 0
        shown = capsys.readouterr().out.splitlines()
        memory, rate = re.match(r"([\d.]+ [KMG]iB) +([\d,]+ tokens/s) +", line).groups()
        assert f"free: {memory} of" in shown[1] and f" {rate} per GPU expected" in shown[3]
        if not is_small:
            assert promised.rate > 1.02 * planned.rate


STAGES = (
    "--parallelism.tensor_parallel_degree=1",
    "--parallelism.expert_parallel_degree=1",
    "--training.local_batch_size=1",
)


def plan_of(capsys, *arguments):
    code = main(["plan", *TINY, *STAGES, "--no-proposals", *arguments])
    return code, capsys.readouterr().out


def test_a_pipeline_is_as_full_as_its_fullest_stage(capsys):
    """Of 2 stages the second has 5 of 6 layers; whichever rank is looked at, the run does not
    fit.
    """
    uneven = (
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_layers=1,5",
    )
    uneven += (
        "--model.overrides.num_layers=6",
        "--world-size=2",
        "--reserved-gib=0",
        "--training.global_batch_size=4",
    )
    _, out = plan_of(capsys, *uneven)
    totals = [float(found) for found in re.findall(r"\n  [01]  .* ([\d.]+) MiB  fits", out)]
    assert len(totals) == 2 and totals[0] < totals[1]
    room = f"--memory-gib={sum(totals) / 2 / 1024}"
    floors = []
    for rank in (0, 1):
        code, out = plan_of(capsys, *uneven, room, f"--rank={rank}")
        assert code == 1 and "DOES NOT FIT" in out and "done in layers 1 to 5" in out
        stages = re.findall(r"\n  [01]  +[01]  +(\d-\d) .* ([\d.]+ MiB)  (fits|does not fit) ", out)
        assert [(layers, fits) for layers, _, fits in stages] == [
            ("0-0", "fits"),
            ("1-5", "does not fit"),
        ]
        assert re.search(rf"\n  total on the GPU +{stages[rank][1]} ", out)
        floors += re.findall(r"speed .*|  at best .*", out)
    assert floors[:2] == floors[2:], "the run's, not the rank's"
    code, out = plan_of(capsys, *uneven, room, "--sweep")
    assert code == 1 and "none of 1 legal combinations of degrees fits" in out, (
        "not judged by its first stage"
    )


def test_a_sweep(capsys):
    heads = (
        "--model.overrides.num_kv_heads=1",
        "--model.overrides.num_experts=4",
        "--gpus-per-node=1",
    )
    argv = [*TINY, *heads, "--world-size=2"]
    code = main(["plan", *argv, "--sweep"])
    out = capsys.readouterr().out
    # one head of keys: no tp
    assert code == 0 and "not legal for this model and batch: 2 more" in out
    request = read_request(argv)
    found, refused = sweep(request.job, request.hardware, 2, partial(plan_run, argv))
    rates = [one.rate for one in found]
    assert refused == 2 and rates == sorted(rates, reverse=True) and all(one.fits for one in found)
    degrees = [one.estimate.degrees for one in found]
    assert sorted((d.dp_replicate, d.dp_shard, d.tp, d.ep) for d in degrees) == [
        (1, 2, 1, 1),
        (1, 2, 1, 2),
        (2, 1, 1, 1),
    ]
    assert main(["plan", *argv, "--no-proposals", *found[0].arguments]) == 0
    assert f"{rates[0]:,.0f} tokens/s per GPU expected" in capsys.readouterr().out


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub with the descriptions of the documents' models, and no network."""
    for family, flavor in (("qwen3_moe", "30B-A3B"), ("qwen3", "0.6B"), ("qwen3_moe", "235B-A22B")):
        config = families()[family].presets[flavor]
        add_to_hub_cache(tmp_path / "hub", f"Qwen/Qwen3-{flavor}", config)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


PLANS = read_table("plans")


@pytest.mark.parametrize("case", PLANS["refused"])
def test_refusals(case, capsys):
    base = TINY if case.get("tiny", True) else ()
    assert main(["plan", *base, *case["given"]]) == 2
    assert case["says"] in capsys.readouterr().err


@pytest.mark.parametrize("text", PLANS["gpus"])
def test_spellings_of_gpus(text):
    request = read_request([*TINY, f"--gpus={text}"])
    assert [request.known.world_size, request.hardware.name] == PLANS["gpus"][text]


@pytest.mark.parametrize("text", ["2e9", "2B", "2 b", "2,000M", "2_000 M tokens"])
def test_spellings_of_tokens(text):
    assert read_request([*TINY, f"--tokens={text}"]).known.tokens == 2e9


def test_adapters_are_proposed_where_nothing_else_fits():
    """In few bits, and then of attention alone; with the settings around them chosen anew."""
    argv = ["--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--gpus=RTX 4090"]
    tried = [" ".join(one) for one in proposals._candidates(plan_run(argv))]
    assert "--lora.rank=16 --lora.base_dtype=nf4" in tried
    assert any("--lora.base_dtype=nf4 --lora.targets=q_proj,k_proj" in one for one in tried)


EXAMPLES = re.findall(
    r"```console\n\$ python -m titanlite (plan .*)\n((?s:.*?))```",
    (ROOT / "docs/plan.md").read_text(),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "text"),
    [
        pytest.param(*example, marks=[pytest.mark.full] * (place > 0), id=example[0].split()[2])
        for place, example in enumerate(EXAMPLES)
    ],
)
def test_the_documentation_shows_what_the_command_prints(command, text, capsys, monkeypatch, cache):
    """Words exactly; numbers within 5 %, so that a kernel that moves a few bytes less needs no new
    page.

    What is tried are the settings on the page alone: a search of all takes 50 s.
    """
    candidates = proposals._candidates

    def shown_ones(base):
        return (one for one in candidates(base) if all(argument in text for argument in one))

    monkeypatch.setattr(proposals, "_candidates", shown_ones)
    main(shlex.split(command))
    shown, printed = text.splitlines(), capsys.readouterr().out.splitlines()
    assert len(EXAMPLES) == 4 and 6 <= len(shown) <= 12
    for line, now in zip(shown, printed, strict=False):
        words, words_now = (re.sub(r"\d[\d.,]*| +", " ", one).split() for one in (line, now))
        assert words == words_now
        numbers, numbers_now = (
            [float(n.strip(".,").replace(",", "")) for n in re.findall(r"\d[\d.,]*", one)]
            for one in (line, now)
        )
        assert numbers == pytest.approx(numbers_now, rel=0.05, abs=1.1)


def test_the_command_of_the_readme_meets_the_limits(cache):
    """Qwen3-235B-A22B on 512 ranks: under 60 s on 2 cores, and 4 GB; time of the processor, for
    tests share theirs.
    """
    (line,) = re.findall(
        r"^python -m titanlite plan .*--world-size 512.*$", (ROOT / "README.md").read_text(), re.M
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *shlex.split(line)[1:], "--no-proposals"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert after.ru_maxrss * 1024 < 4e9  # of the largest child so far
