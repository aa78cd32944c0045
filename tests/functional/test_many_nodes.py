"""Several machines, each with its own address: launchers meet, agree to stop, lose one another and
continue.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from cluster import Launched, variables_of
from files import file_digest, write_json
from safetensors.torch import save_file

from tests.functional.conftest import train_to_the_end, values_of
from titanlite.base.errors import ConfigError
from titanlite.checkpoint.commit import list_steps
from titanlite.config import JobConfig
from titanlite.config.assets import list_model_paths
from titanlite.config.model import ModelSection
from titanlite.config.parallelism import Degrees
from titanlite.config.schema import CheckpointSection
from titanlite.features.copies import check_same_copies
from titanlite.launch.rendezvous import find_free_port
from titanlite.metrics import run_folder
from titanlite.metrics.run_folder import (
    check_same_settings,
    check_shared_folder,
    waiting_for_machines,
)

# A lost launcher is noticed after 6 s instead of 15, and a run with fewer machines than the most
# waits 10 s for another one instead of 30: the second machine of a test needs a few on a busy core.
QUICK = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=10,join_timeout=120"
STEPS = 16
SETTINGS = [
    f"--training.steps={STEPS}",
    "--training.local_batch_size=4",  # one micro-batch on 2 ranks
    "--checkpoint.keep_latest_k=0",
]
FILES = ("model.safetensors", "titanlite/optimizer.safetensors")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="run_train.sh needs bash")


class Cluster:
    """Machines on which one run trains, each with `run_train.sh` and one rank."""

    def __init__(self, config, dump, *overrides, env):
        self.dump, self.env = dump, env
        self.arguments = [f"--config={config}", f"--job.dump_folder={dump}", *overrides]
        self.machines = []

    def start(self, variables, prefix=()):
        """Start a machine; `prefix` puts it into a network namespace."""
        command = [*prefix, "./run_train.sh", *self.arguments]
        self.machines.append(Launched(command, env={**self.env, **variables}))
        return self.machines[-1]

    @property
    def out(self):
        """The output of all machines; only the machine of rank 0 writes much."""
        return "".join(machine.out for machine in self.machines)

    @property
    def checkpoints(self):
        return self.dump / "checkpoint"

    def steps(self):
        return {step for machine in self.machines for step in machine.steps()}

    def wait_for_step(self, step):
        """Wait until any machine reports the step: the rendezvous chooses which machine has rank
        0.
        """
        newest = self.machines[-1]
        newest.wait_for(f"step {step}", lambda: step in self.steps())

    def report(self):
        return "\n".join(machine.report() for machine in self.machines)

    def end(self, *ending):
        """Wait until all machines have ended by themselves with exit code 0."""
        for machine in ending:
            assert machine.end() == 0, self.report()


@pytest.fixture
def cluster(config_file, tmp_path, server):
    server.wait_until_it_serves()
    environment = server.environment(NGPU="1", PYTHONUNBUFFERED="1")
    made = []

    def make(interval):
        overrides = [*SETTINGS, f"--checkpoint.interval={interval}"]
        made.append(Cluster(config_file, tmp_path / "cluster", *overrides, env=environment))
        return made[-1]

    yield make
    for each in made:
        for machine in each.machines:
            machine.kill()


@dataclass(frozen=True)
class Namespaces:
    """Two network namespaces with a cable between them; both have the host name of this machine."""

    prefixes: tuple[list[str], list[str]]
    addresses: tuple[str, str]


@pytest.fixture(scope="module")
def places():
    """Two namespaces where the test may make them, which needs root and iproute2's `ip`; else None:
    both launchers share this machine's network.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        yield None
        return
    names = [f"titanlite-{os.getpid()}-{i}" for i in range(2)]
    links = [f"tl{os.getpid() % 100000}{end}" for end in "ab"]
    addresses = ("10.213.77.1", "10.213.77.2")
    setup = [f"netns add {name}" for name in names]
    setup += [f"link add {links[0]} type veth peer name {links[1]}"]
    for name, link, address in zip(names, links, addresses, strict=True):
        setup += [f"link set {link} netns {name}", f"-n {name} addr add {address}/24 dev {link}"]
        setup += [f"-n {name} link set {link} up", f"-n {name} link set lo up"]

    def is_done(command):
        return subprocess.run(["ip", *command.split()], capture_output=True).returncode == 0

    first, second = (["ip", "netns", "exec", name] for name in names)
    try:
        yield Namespaces((first, second), addresses) if all(map(is_done, setup)) else None
    finally:
        for name in names:
            is_done(f"netns del {name}")


def elastic(nnodes, places=None):
    """Return the variables of the machine that hosts the rendezvous, and of the other machines. On
    one machine both have the same host name, so the variables name the host; in namespaces the
    address decides, as on real machines.
    """
    port = find_free_port()
    common = {"NNODES": nnodes, "RDZV_ID": f"test-{port}", "MAX_RESTARTS": "3"}
    if places is not None:
        common |= {"RDZV_ENDPOINT": f"{places.addresses[0]}:{port}", "RDZV_CONF": QUICK}
        return common, common
    common |= {"RDZV_ENDPOINT": f"localhost:{port}"}
    return common | {"RDZV_CONF": f"{QUICK},is_host=1"}, common | {
        "RDZV_CONF": f"{QUICK},is_host=0"
    }


@pytest.fixture(scope="module")
def undisturbed(run_ranks, configure, tmp_path_factory):
    """The folder of the same run on 2 ranks of one machine."""
    dump = tmp_path_factory.mktemp("undisturbed")
    settings = [f"--job.dump_folder={dump}", *SETTINGS, "--checkpoint.interval=0"]
    run_ranks(2, train_to_the_end, configure(Degrees(dp_shard=2), *settings))
    return dump


@pytest.mark.slow
def test_a_killed_machine_comes_back_and_the_weights_are_those_of_an_undisturbed_run(
    cluster, undisturbed, places
):
    """Two launchers run in two network namespaces, if the test may make them. First
    one launcher gets SIGTERM: all ranks save and end with 0. Then the run continues, and all
    processes of one launcher get SIGKILL: that launcher comes back, and the ranks of both resume
    from the newest checkpoint.
    """
    run = cluster(4)
    host, other = elastic("2", places)
    here, there = ([], []) if places is None else places.prefixes
    first, second = run.start(host, here), run.start(other, there)
    run.wait_for_step(2)
    variables = variables_of(second.process.pid)
    assert variables["TORCH_CPP_LOG_LEVEL"] == "ERROR", (
        "torch would write 40 lines of a lost machine"
    )
    second.process.terminate()
    run.end(first, second)
    stopped = list_steps(run.checkpoints)[-1]
    assert f"stopped after step {stopped} of {STEPS}, saved" in run.out
    assert "Traceback" not in first.err + second.err
    assert second.err.count("SIGTERM: finishing this step and saving") == 1
    assert (
        first.err
        == f"titanlite: waiting for 2 machines at {host['RDZV_ENDPOINT']}, rendezvous "
        + (f"'{host['RDZV_ID']}' ...\n")
    )

    newest = (stopped // 4 + 1) * 4
    first, second = run.start(host, here), run.start(other, there)
    run.wait_for_step(newest + 1)
    second.kill()
    again = run.start(other, there)
    run.end(first, again)
    resumed = [int(step) for step in re.findall(r"resuming from \S*step-(\d+)", run.out)]
    assert len(resumed) == 2 and resumed[0] == stopped and resumed[1] >= newest
    assert run.steps() == set(range(1, STEPS + 1))
    assert "Traceback" not in first.err + again.err, run.report()

    for name in FILES:
        expected = undisturbed / f"checkpoint/step-{STEPS}" / name
        assert file_digest(run.checkpoints / f"step-{STEPS}" / name) == file_digest(expected), name


@pytest.mark.slow
def test_a_run_goes_on_with_the_machines_that_are_left(cluster, undisturbed):
    """With NNODES=1:2, one machine is lost for good, and the other continues with
    the same batches.
    """
    run = cluster(4)
    host, other = elastic("1:2")
    first, second = run.start(host), run.start(other)
    run.wait_for_step(6)
    second.kill()
    run.end(first)
    assert "dp_shard 2 x tp 1, ep 1, 2 ranks on cpu" in run.out
    assert "dp_shard 1 x tp 1, ep 1, 1 rank on cpu" in run.out
    expected, losses = (values_of(dump, "loss/train") for dump in (undisturbed, run.dump))
    assert expected.keys() == set(range(1, STEPS + 1))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_sigterm_ends_a_machine_that_waits_for_others_at_once(cluster):
    """The run has nothing to save yet, and a wait of 10 minutes would exceed the grace period of a
    queue.
    """
    run = cluster(0)
    host, _ = elastic("2")
    alone = run.start(host)
    alone.wait_for("the wait", lambda: "waiting for 2 machines" in alone.err)
    alone.process.terminate()
    assert alone.process.wait(30) == 128 + signal.SIGTERM
    assert alone.err.splitlines()[1:] == ["titanlite: stopped by SIGTERM, with all ranks."]


# --- folders, settings and models that all machines must share


def test_folders_and_settings_that_differ_are_one_error_on_all_ranks(
    run_ranks, checked, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_folder, "_VISIBLE_WITHIN_S", 0.2)
    base, other = (
        checked(Degrees(dp_shard=4), f"--optimizer.lr={rate}").job for rate in ("1e-3", "2e-3")
    )
    for name in "ab":
        (tmp_path / name).mkdir()

    def rank_main():
        rank = dist.get_rank()
        messages = []
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        check_shared_folder(tmp_path / "a")
        check_same_settings(base)
        for compare in (
            lambda: check_shared_folder(tmp_path / ("a" if rank < 2 else "b")),
            lambda: check_same_settings(base if rank < 2 else other),
        ):
            with pytest.raises(ConfigError) as caught:
                compare()
            messages.append(str(caught.value))
        os.environ["LOCAL_WORLD_SIZE"] = "4"
        # one machine: nothing to find out
        check_shared_folder(tmp_path / ("a" if rank < 2 else "b"))
        assert torch.ones(1).sum() == 1
        return messages

    results = run_ranks(4, rank_main)
    assert all(result == results[0] for result in results)
    shared, settings = results[0]
    host = socket.gethostname()
    assert shared == (
        f"job.dump_folder: {tmp_path}/b on {host} is not the folder that rank 0 has, or cannot be "
        "written to. Put the folder on a file system that all machines share, with the same user. "
        "(ranks 2, 3)"
    )
    assert settings == (
        f"configuration: optimizer.lr = 0.002 on {host}, 0.001 on rank 0. Start every machine with "
        "the same files and arguments. (ranks 2, 3)"
    )
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []], (
        "nothing is left behind"
    )


def write_model(folder, change=lambda name, content: content):
    """Write a model of two files of 200 KB of data, and its tokenizer; `change` returns the content
    of each file.
    """
    folder.mkdir(parents=True)
    weight_map = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    for seed, (key, file) in enumerate(weight_map.items()):
        generator = torch.Generator().manual_seed(seed)
        save_file({key: torch.randn(100, 500, generator=generator)}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text(str(folder))  # may differ
    for path in folder.iterdir():
        content = change(path.name, path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)
    return folder


SECOND = "model-00002-of-00002.safetensors"


def flip(file, place):
    """Change one byte of `file`."""

    def change(name, content):
        changed = bytearray(content)
        if name == file:
            changed[place] ^= 1
        return changed

    return change


COPIES = {
    "the start": (flip(SECOND, -200_000), f"{SECOND} differs"),
    "config.json": (flip("config.json", 3), "config.json differs"),
    "a file less": (
        lambda name, content: None if name == "tokenizer.json" else content,
        "tokenizer.json (missing) differs",
    ),
}


def test_machines_with_other_copies_of_a_model_are_one_error_that_names_them(
    run_ranks, tmp_path, monkeypatch
):
    """There are two machines of one rank, and the last one has another copy: each case changes one
    file and keeps its size.
    """
    usual = write_model(tmp_path / "usual")
    same = write_model(tmp_path / "same")
    others = {
        name: write_model(tmp_path / f"other{i}", change)
        for i, (name, (change, _)) in enumerate(COPIES.items())
    }
    snapshots = [tmp_path / f"{i}/models--acme--tiny/snapshots/{i}{'a' * 39}" for i in range(2)]
    for snapshot in snapshots:
        write_model(snapshot)

    def rank_main():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        rank, messages = dist.get_rank(), {}

        def check(mine, other):
            path = str(mine if rank == 0 else other)
            job = JobConfig(model=ModelSection(path=path, hf_assets_path=path))
            job = replace(job, checkpoint=CheckpointSection(initial_load_path=path))
            try:
                check_same_copies(list_model_paths(job))
            except ConfigError as error:
                return str(error)
            return ""

        messages["same"] = check(usual, same)
        messages["hub"] = check(*snapshots)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        messages["one machine"] = check(usual, others["config.json"])
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        return messages | {name: check(usual, other) for name, other in others.items()}

    results = run_ranks(2, rank_main)
    assert all(result == results[0] for result in results)
    found, host = results[0], socket.gethostname()
    assert found["same"] == found["one machine"] == ""
    commits = f"the commit (1{'a' * 39}, not 0{'a' * 39}) differs"
    expected = {name: text for name, (_, text) in COPIES.items()} | {"hub": commits}
    for name, text in expected.items():
        mine, other = (usual, others[name]) if name != "hub" else snapshots
        assert found[name] == (
            f"configuration: model.path: {other} on {host} (rank 1) is a different copy than "
            f"{mine} on {host} (rank 0): {text}. Copy it there again, or put it on a "
            "file system that all machines share."
        )


def test_machines_wait_for_one_that_prepares_its_data_longer_than_collectives_may_take(
    run_ranks, monkeypatch
):
    """The limit of this test's group, 300 s, does not apply: the machines wait in a separate group,
    whose limit is checked.
    """
    limits, real = [], dist.new_group

    def new_group(**options):
        limits.append(options["timeout"])
        return real(**options)

    monkeypatch.setattr(dist, "new_group", new_group)

    def rank_main():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        dist.barrier()
        start = time.monotonic()
        with waiting_for_machines():
            time.sleep(1.0 if dist.get_rank() == 3 else 0.0)
        waited = time.monotonic() - start
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with waiting_for_machines():  # one machine: its ranks wait for each other in the cache
            pass
        return waited, [limit.total_seconds() for limit in limits]

    for waited, found in run_ranks(4, rank_main):
        assert waited >= 1.0 and found == [24 * 3600.0]
