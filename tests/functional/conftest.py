"""Fixtures of the functional tests: small text, checked configurations, and real trainers on gloo
ranks.
"""

import multiprocessing
import os
import random
import runpy
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy.ma  # noqa: F401
import pytest
import torch
from cluster import Launched
from files import read_lines, write_lines
from processes import Finished, run_to_end
from rank_server import RankServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor

# Steps and saves import these modules. One import here takes 2 s; otherwise every forked rank would
# take 2 s.
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast  # noqa: F401

from tests.conftest import Ranks
from tests.saving import save_hf_model
from titanlite.__main__ import main
from titanlite.assemble import assemble, build_data
from titanlite.base.agree import gather_objects
from titanlite.config import load_config
from titanlite.config.parallelism import Degrees
from titanlite.config.settings import find_setting, get_value
from titanlite.distributed.grads import reduce_replicated_grads
from titanlite.materialize import Init, Normal, materialize
from titanlite.materialize.layout import is_remote, local_of
from titanlite.materialize.plan import named_tensors
from titanlite.models.decoder import build_decoder
from titanlite.preflight import check

ROOT = Path(__file__).parents[2]


class _OmegaConf:
    """The part of OmegaConf that `Reader` calls, for valid values."""

    structured = staticmethod(lambda schema: schema())
    to_object = staticmethod(lambda job: job)

    @staticmethod
    def update(job, key, value):
        section, _, name = key.rpartition(".")
        setting = find_setting(key)
        assert setting is not None
        if setting.kind is bool and isinstance(value, str):
            value = value == "true"
        setattr(get_value(job, section), name, None if value is None else setting.kind(value))


if find_spec("omegaconf") is None:  # machines with GPUs that have torch and little else
    sys.modules["omegaconf"] = SimpleNamespace(OmegaConf=_OmegaConf)

VOCAB_SIZE = 310  # of tokenizer and model: 310 / 4 = 77.5, so that vocabulary shards are uneven
SEQ_LEN = 32
GLOBAL_BATCH_SIZE = 8
CALLS_OF_RANKS = 20
weekly = partial(pytest.param, marks=pytest.mark.full)  # a case that runs with --full alone
# Ranks add float32 numbers in another order; this is 30 times the difference that
# test_parity_ladder.py measured.
RELATIVE_TOLERANCE = 1e-5
# These overrides leave the sizes of a model to its config.json.
NO_PRESET = [
    "--model.flavor=",
    "--model.overrides.vocab_size=none",
    "--model.overrides.num_layers=none",
]
LONGEST = (
    "parity_ladder",
    "checkpoint_load",
    "resume",
    "many_nodes",
    "training",
    "end_to_end",
    "docs_commands",
    "extending",
    "block_weights",
    "plan",
)

_CONFIG = """
[model]
name = "qwen3_moe"
flavor = "debug"
[model.overrides]
vocab_size = {vocab_size}
num_layers = 2
[training]
steps = 5
seq_len = {seq_len}
global_batch_size = {global_batch_size}
local_batch_size = 2
[optimizer]
lr = 5e-3
eps = 1e-5
[lr_scheduler]
warmup_steps = 2
[moe]
expert_bias_update_rate = 1e-2
[metrics]
log_freq = 1
enable_tensorboard = false
[data]
dataset = "text"
path = "{text}"
bpe_vocab_size = {vocab_size}
cache_folder = "{cache}"
"""

_CHAT_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MESHES = {
    "1": Degrees(),
    # the parity ladder
    "FSDP4": Degrees(dp_shard=4),
    "HSDP2x2": Degrees(dp_replicate=2, dp_shard=2),
    "TP2xFSDP2": Degrees(dp_shard=2, tp=2),
    "EP4": Degrees(dp_shard=4, ep=4),
    "EP2xFSDP2": Degrees(dp_shard=4, ep=2),
    "TP2xEP2": Degrees(dp_shard=2, tp=2, ep=2),
    "TP2xEP4": Degrees(dp_shard=2, tp=2, ep=4),
    # These meshes are not in the ladder: replication together with the other axes.
    "DDP4": Degrees(dp_replicate=4),
    "HSDP2x2xEP2": Degrees(dp_replicate=2, dp_shard=2, ep=2),
    "HSDP2xTP2xEP2": Degrees(dp_replicate=2, tp=2, ep=2),
    # Sequences are split. The models have 2 key/value heads, so with 4 ranks each head goes to two
    # of them.
    "CP4": Degrees(cp=4),
    "CP2xFSDP2": Degrees(dp_shard=2, cp=2),
    "CP2xTP2": Degrees(tp=2, cp=2),
    "CP2xEP2": Degrees(dp_shard=2, cp=2, ep=2),
    "CP2xTP2xEP4": Degrees(tp=2, ep=4, cp=2),
    "HSDP2xCP2": Degrees(dp_replicate=2, cp=2),
    "PP4": Degrees(dp_shard=1, pp=4),
    "PP2xFSDP2": Degrees(dp_shard=2, pp=2),
    "PP2xHSDP2": Degrees(dp_replicate=2, pp=2),
    "PP2xTP2": Degrees(tp=2, pp=2),
    "PP2xEP2": Degrees(dp_shard=2, ep=2, pp=2),
    "PP2xTP2xEP2": Degrees(tp=2, ep=2, pp=2),
    "PP2xCP2": Degrees(cp=2, pp=2),
    # Two ranks, for features whose behaviour other ranks would not change.
    "FSDP2": Degrees(dp_shard=2),
    "EP2": Degrees(dp_shard=2, ep=2),
    "TP2": Degrees(tp=2),
    "TP2xEP2 only": Degrees(tp=2, ep=2),
    "CP2": Degrees(cp=2),
    "PP2": Degrees(pp=2),
}


def pytest_collection_modifyitems(items):
    """Run long files first, because each worker takes a whole file at a time, and short files at
    the end balance the workers.
    """
    here = Path(__file__).parent  # `items` has all tests; reorder only this folder's
    order = Counter(
        item.path for item in items if item.path.parent == here and item.get_closest_marker("slow")
    )
    order |= Counter({here / f"test_{name}.py": 100 - at for at, name in enumerate(LONGEST)})
    items.sort(key=lambda item: -order[item.path])


def degree_overrides(degrees):
    return [
        f"--parallelism.data_parallel_replicate_degree={degrees.dp_replicate}",
        f"--parallelism.data_parallel_shard_degree={degrees.dp_shard}",
        f"--parallelism.context_parallel_degree={degrees.cp}",
        f"--parallelism.tensor_parallel_degree={degrees.tp}",
        f"--parallelism.expert_parallel_degree={degrees.ep}",
        f"--parallelism.pipeline_parallel_degree={degrees.pp}",
    ]


@pytest.fixture(scope="session")
def meshes():
    return MESHES


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """120 short documents of random words, so that most sequences of 32 tokens hold a document's
    end.
    """
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = [
        "def",
        "return",
        "self.",
        "x",
        "yy",
        "(a, b)",
        "\n",
        "    ",
        "12345",
        "import",
        "\u00e9t\u00e9",
        "for i in",
    ]
    for i in range(120):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(10, 80))) + "\n"
        (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    """Tokenizers and token files of the whole test session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def config_file(tmp_path_factory, text_folder, cache_folder):
    """A tiny Qwen3-MoE on `text_folder`; its tokenizer and tokens are in the cache already."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    text = _CONFIG.format(
        vocab_size=VOCAB_SIZE,
        seq_len=SEQ_LEN,
        global_batch_size=GLOBAL_BATCH_SIZE,
        text=text_folder,
        cache=cache_folder,
    )
    path.write_text(text, encoding="utf-8")
    tokenizer, loader = build_data(load_config(["--config", str(path)]), 0, 1)
    assert len(tokenizer) == loader.dataset.tokenized.vocab_size == VOCAB_SIZE
    return path


@pytest.fixture(scope="session")
def examples(tmp_path_factory, cache_folder):
    """Overrides for 60 chats of one to three turns, with a tokenizer that fits the model's
    vocabulary.
    """
    folder = tmp_path_factory.mktemp("examples")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant what is one and two"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    rng = random.Random(0)
    rows = []
    for i in range(60):
        turns = [
            ["what", "one", "and", "two", "is"][: rng.randint(1, 5)]
            for _ in range(2 * rng.randint(1, 3))
        ]
        roles = ["user", "assistant"] * 3
        messages = [
            {"role": r, "content": f"{i} {' '.join(t)}"} for r, t in zip(roles, turns, strict=False)
        ]
        rows.append({"messages": messages})
    write_lines(folder / "chats.jsonl", rows)
    return [
        "--data.dataset=examples",
        f"--data.path={folder / 'chats.jsonl'}",
        f"--data.tokenizer_path={folder}",
        "--model.init=random",
        "--training.seq_len=128",
        f"--data.cache_folder={cache_folder}",
    ]


def path_of(overrides):
    """Return `data.path` of `overrides`."""
    return dict(override.split("=", 1) for override in overrides)["--data.path"]


@pytest.fixture
def pairs(examples, tmp_path):
    """Overrides for 40 preference pairs with the tokenizer of `examples`."""
    rows = [
        {"prompt": f"what is {i}", "chosen": "one " * (1 + i % 4), "rejected": "two"}
        for i in range(40)
    ]
    write_lines(tmp_path / "pairs.jsonl", rows)
    return [*examples, f"--data.path={tmp_path / 'pairs.jsonl'}", "--training.objective=dpo"]


def documents_of(loader, step):
    """Return (tokens, labels) of every document in the batches of a step, each by itself."""
    return [
        (tokens[ids == i], labels[ids == i])
        for batch in loader.micro_batches(step)
        for tokens, labels, ids in zip(batch.tokens, batch.labels, batch.document_ids, strict=True)
        for i in range(int(ids.max()) + 1)
    ]


@pytest.fixture
def launch(server, config_file, tmp_path):
    """`launch(folder name, *overrides)` starts 2 ranks, which train into this folder of `tmp_path`
    until they are told to stop; unless `served`, as a user starts them, in new processes.
    `restarts` and `misbehave`, code that all processes run first, are for served ones.
    """
    started = []

    def start(name, *overrides, served=True, restarts=0, misbehave=""):
        arguments = ["--config", str(config_file), f"--job.dump_folder={tmp_path / name}"]
        arguments += ["--training.steps=100000", *overrides]
        if served:
            folder = tmp_path / f"pids-{len(started)}"
            folder.mkdir()
            (folder / "misbehave.py").write_text(misbehave)
            ranks = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
            ranks += ["-m", "titanlite.rank"]
            started.append(server.launch(*ranks, *arguments, folder=folder))
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            env = server.environment(NGPU="2", PYTHONUNBUFFERED="1", PATH=path)
            started.append(Launched(["./run_train.sh", *arguments], env=env))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture(scope="session")
def configure(config_file):
    """`configure(degrees, *overrides)` -> the tiny configuration, checked as a rank does it."""

    def build(degrees, *overrides):
        argv = ["--config", str(config_file), *degree_overrides(degrees), *overrides]
        return check(load_config(argv), degrees.world_size)

    return build


@pytest.fixture
def checked(configure, tmp_path):
    """`configure` with a dump folder of this test."""

    def build(degrees, *overrides):
        return configure(degrees, f"--job.dump_folder={tmp_path / 'run'}", *overrides)

    return build


@pytest.fixture(scope="module")
def base_folders(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def pretrained(run_ranks, checked, base_folders):
    """`pretrained(name, std, *overrides)`: the folder of a native model in Hugging Face's format,
    with its tokenizer, made once for each test file. `std` is the standard deviation of the
    projections.
    """

    def get(name, std, *overrides):
        folder = base_folders / name
        if not folder.exists():
            job = checked(Degrees(), *overrides)

            def rank_main():
                tokenizer, _ = build_data(job.job, 0, 1)
                model = build_decoder(job.model_config)
                plan = materialize(
                    model, "cpu", [{"model.layers.*_proj*": Init(Normal(std=std))}], seed=3
                )
                save_hf_model(model, plan, tokenizer, folder, torch.float32)

            run_ranks(1, rank_main)
        return folder

    return get


@dataclass
class Run:
    """The results of a few steps of a trainer, as seen by one rank.

    `digests` are taken from the full initial tensors; `weights` are the full final tensors. Both
    include buffers.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens_per_expert: list[list[list[int]]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def full_tensors(model):
    """Every parameter and buffer under each of its names, gathered. All tensors are in one message
    of each rank: a collective for each tensor would take half of the time of a test. Collective:
    every rank must call.
    """
    held = {}
    for name, tensor, _ in named_tensors(model):
        if not is_remote(tensor):
            is_split = isinstance(tensor, DTensor)
            layout = (tensor.device_mesh.mesh, tensor.placements) if is_split else None
            held[name] = local_of(tensor).clone(), layout
    of_ranks = gather_objects(held)
    found = {}
    for name, _, _ in named_tensors(model):  # in a pipeline, another stage may hold a tensor
        holder = held if name in held else next(other for other in of_ranks if name in other)
        local, layout = holder[name]
        found[name] = local if layout is None else join_shards(name, of_ranks, *layout)
    return found


def join_shards(name, of_ranks, ranks, placements):
    """Put a tensor together from the shards that `ranks`, an array with one dimension for each
    placement, hold. Of replicas it takes this rank's own.
    """
    own = (ranks == torch.distributed.get_rank()).nonzero().tolist() or [[0] * ranks.dim()]
    split = [at for at, placement in enumerate(placements) if not placement.is_replicate()]
    # FSDP splits the shards of tp and ep: its strided shards are the innermost ones.
    split.sort(key=lambda at: hasattr(placements[at], "split_factor"))

    def join(index, left):
        if not left:
            return of_ranks[ranks[tuple(index)]][name][0]
        at, *inner = left
        parts = [
            join([*index[:at], place, *index[at + 1 :]], inner) for place in range(ranks.shape[at])
        ]
        return torch.cat(parts, placements[at].dim)

    return join(own[0], split)


def digest(tensor):
    """Hash the shape, dtype and bits of a tensor."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).hexdigest()


def take_step(trainer, step):
    """Train on the batches of `step`; return the result. Collective: every rank must call."""
    return trainer.parts.stepper.train_step(trainer.parts.loader.micro_batches(step))


def forward_once(trainer):
    """Return the losses of the first micro-batch. Collective: every rank must call."""
    batch = trainer.parts.loader.micro_batches(0)[0]
    return trainer.model(batch.tokens, batch.labels, batch.positions, batch.document_ids)


def backward_once(trainer, divisor=1):
    """Give all parameters the gradients of the first micro-batch's summed loss; return its losses.
    Collective: every rank must call.
    """
    losses = forward_once(trainer)
    (losses.cross_entropy / divisor).backward()
    reduce_replicated_grads(trainer.model.parameters(), trainer.parts.stepper.dims)
    return losses


def train_steps(trainer, steps):
    """Train `steps` steps on the trainer's own data with `TrainStep.train_step`. Collective: every
    rank must call.
    """
    run = Run(
        digests={name: digest(tensor) for name, tensor in full_tensors(trainer.model).items()}
    )
    for _ in range(steps):
        result = take_step(trainer, trainer.step)
        run.losses.append(result.loss.item())
        run.grad_norms.append(result.grad_norm.item())
        if result.tokens_per_expert is not None:
            run.tokens_per_expert.append(result.tokens_per_expert.tolist())
    run.weights = full_tensors(trainer.model)
    return run


def assert_same_run(one, ranks, tolerance_of, *, equal_nan=False):
    """Compare the runs of the ranks of a mesh with the run of one process: initial bits, losses,
    gradient norms and counts of every rank, and the final weights, where `tolerance_of(name)` is
    the absolute tolerance.
    """
    for rank, many in enumerate(ranks):
        assert many.digests == one.digests, "initial weights are not bit-identical"
        assert many.losses == pytest.approx(one.losses, rel=RELATIVE_TOLERANCE), rank
        assert many.grad_norms == pytest.approx(one.grad_norms, rel=RELATIVE_TOLERANCE), rank
        assert many.tokens_per_expert == one.tokens_per_expert, rank
    assert ranks[0].weights.keys() == one.weights.keys()
    for name, expected in one.weights.items():
        # The counts are of this rank's latest micro-batch; the global counts are compared above.
        if not name.endswith(".tokens_per_expert"):
            torch.testing.assert_close(
                ranks[0].weights[name],
                expected,
                rtol=0,
                atol=tolerance_of(name),
                equal_nan=equal_nan,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def values_of(folder, name):
    """Return a metric of the run in `folder` by step; if a step was trained twice, the later
    value.
    """
    points = read_lines(folder / "metrics.jsonl")
    return {point["step"]: point[name] for point in points if name in point}


def run_on_this_rank(job, steps):
    run = train_steps(assemble(job), steps)
    if torch.distributed.get_rank() > 0:  # all ranks gathered the same tensors; pickle them once
        run.weights = {}
    return run


@pytest.fixture
def train_run(run_ranks, checked):
    """`train_run(degrees, *overrides, steps=5)` -> one `Run` per rank, from real trainers on forked
    gloo ranks.
    """

    def train(degrees, *overrides, steps=5):
        return run_ranks(degrees.world_size, run_on_this_rank, checked(degrees, *overrides), steps)

    return train


def call_anew(function, *args):
    torch.manual_seed(0)
    return function(*args)


@pytest.fixture(scope="module")
def once():
    """`once(key, make)`: what `make()` returned for this key, called once for each test file."""
    made = {}

    def get(key, make):
        if key not in made:
            made[key] = make()
        return made[key]

    return get


@pytest.fixture(scope="module")
def run_warm():
    """`run_ranks` on ranks that the tests of a file share. They do not see what a test has patched,
    and the function must be defined in a module. The ranks have trained before, but are replaced
    after some runs, because each run makes groups of ranks.
    """
    made = {}

    def run(world_size, function, *args):
        ranks, calls = made.get(world_size, (None, 0))
        if ranks is not None and (calls == CALLS_OF_RANKS or not ranks.is_usable):
            ranks.end()
            ranks, calls = None, 0
        made[world_size] = ranks or Ranks(world_size, call_anew), calls + 1
        return made[world_size][0].call(function, *args)

    yield run
    for ranks, _ in made.values():
        ranks.end()


@pytest.fixture
def warm_run(run_warm, checked):
    """`train_run` on the ranks of `run_warm`."""

    def train(degrees, *overrides, steps=5):
        return run_warm(degrees.world_size, run_on_this_rank, checked(degrees, *overrides), steps)

    return train


def train_to_the_end(job):
    assemble(job).train()


@pytest.fixture
def train_into(run_warm, checked):
    """`train_into(folder, degrees, *overrides)`: a whole `Trainer.train` with this dump folder, on
    the ranks of `run_warm`.
    """

    def train(folder, degrees, *overrides):
        job = checked(degrees, f"--job.dump_folder={folder}", *overrides)
        run_warm(degrees.world_size, train_to_the_end, job)

    return train


def run_forked(function):
    """Call `function()` in a fork, which has no process group and shares the imports."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(200)
    assert process.exitcode == 0


def run_script(path):
    """Return what `python FILE` prints, in a fork and in the folder of the file."""

    def alone():
        os.chdir(path.parent)
        with open("printed", "w") as out, redirect_stdout(out):
            runpy.run_path(path.name, run_name="__main__")

    run_forked(alone)
    return (path.parent / "printed").read_text()


@pytest.fixture
def command(capsys):
    """`command(*arguments)` runs `python -m titanlite` in this process."""

    def run(*arguments):
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        assert not torch.distributed.is_initialized(), "the next call would find a group of ranks"
        return Finished(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Starts processes of titanlite in milliseconds: rank_server.py."""
    server = RankServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def run_process(server):
    """`run_process(arguments, timeout_s)` in the checkout; a hang fails.

    `sys.executable` in `arguments`, and the `python3` that a script finds, start titanlite from the
    server.
    """

    def run(arguments, timeout_s, env=None):
        server.wait_until_it_serves()
        arguments = [
            server.python if argument == sys.executable else argument for argument in arguments
        ]
        environment = server.environment(**(env or {}))
        return run_to_end(arguments, cwd=ROOT, env=environment, timeout_s=timeout_s)

    return run
