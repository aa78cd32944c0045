"""One machine: where its processes listen, and what is left when the launcher alone is killed in
the middle of saves.

Ranks are forked from a server, so that a start takes a second. With more kills, by hand:
`TITANLITE_KILLS=25 python -m pytest tests/functional/test_kill_drill.py`
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_server import RankServer, rank_pid

from titanlite.checkpoint.commit import check_folder, list_steps, step_folder

KILLS = int(os.environ.get("TITANLITE_KILLS", "2"))
RANKS = 2
WAIT_S = 240  # for what takes 2 s on idle cores
ORPHANS_END_S = 10  # 0.2 on idle cores; the drill prints the longest
TWO_STARTS_EVERY = 5
LISTENS = "0A"  # in /proc/net/tcp

pytestmark = pytest.mark.timeout(900 if KILLS <= 2 else 0)


class Run:
    """One launcher with its ranks; `pids` are theirs once they run."""

    def __init__(
        self, server: RankServer, config: Path, dump: Path, folder: Path, *settings: str
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.launched = server.launch(
            *(
                "--standalone",
                f"--nproc-per-node={RANKS}",
                "--max-restarts=1",
                "-m",
                "titanlite.rank",
            ),
            *(
                "--config",
                str(config),
                f"--job.dump_folder={dump}",
                "--training.steps=100000",
                *settings,
            ),
            folder=folder,
            TMPDIR=str(folder.parent),
        )

    def steps(self) -> list[int]:
        lines = [line.split() for line in self.launched.out.splitlines() if "/100000 " in line]
        return [int(words[words.index("step") + 1].partition("/")[0]) for words in lines]

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        self.launched.wait_for(what, condition, WAIT_S)

    def pids(self) -> list[int]:
        ranks = [rank_pid(self.folder, rank) for rank in range(RANKS)]
        return [int((self.folder / "launcher.pid").read_text()), *ranks]

    def is_over(self) -> bool:
        return self.launched.process.poll() is not None

    def stop(self) -> None:
        self.launched.process.terminate()
        assert self.launched.end(WAIT_S) == 0, self.launched.out


def listening(pids: list[int]) -> set[str]:
    """Addresses, in the kernel's spelling, on which these processes accept connections."""
    links = [
        os.readlink(path)
        for pid in pids
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if path.is_symlink()
    ]
    inodes = {
        link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[at] for at in (1, 3, 9))
            if state == LISTENS and inode in inodes:
                found.add(address.partition(":")[0])
    return found


@pytest.mark.slow
def test_nothing_listens_but_on_the_loopback_interface_before_and_after_a_restart(
    server, config_file, tmp_path
):
    run = Run(server, config_file, tmp_path / "run", tmp_path / "pids")
    for start in (1, 2):
        run.wait_for(
            "steps", lambda start=start: run.steps().count(1) == start and run.steps()[-1] > 1
        )
        assert listening(run.pids()) == {"0100007F"}
        if start == 1:
            os.kill(run.pids()[2], signal.SIGKILL)
    run.stop()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_launcher_that_is_killed_takes_its_ranks_along_and_the_next_one_goes_on(
    server, config_file, tmp_path, mode
):
    """Of two that start at once, one goes on and the other is refused."""
    rng, dump = random.Random(KILLS), tmp_path / "run"
    checkpoints = dump / "checkpoint"
    settings = [
        f"--checkpoint.async_mode={mode}",
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=3",
    ]

    def start(name: str) -> Run:
        return Run(server, config_file, dump, tmp_path / name, *settings)

    run, other, gone_s, refused = start("a"), None, [], 0
    for kill in range(KILLS + 1):
        first = max(list_steps(checkpoints), default=0)
        if other is not None:
            both = [run, other]
            run.wait_for(
                "end of one", lambda both=both: any(map(Run.is_over, both))
            ) if not run.is_over() else None
            run, loser = sorted(both, key=Run.is_over)
            assert (
                loser.launched.end(WAIT_S) == 2 and "another run writes into" in loser.launched.out
            ), loser.launched.out
            refused += 1
        run.wait_for("steps", run.steps)
        assert run.steps()[0] == first + 1, (first, run.launched.out)
        assert (f"resuming from {step_folder(checkpoints, first)}" in run.launched.out) == (
            first > 0
        )
        target = run.steps()[-1] + rng.randint(1, 6)
        run.wait_for(f"step {target}", lambda run=run, target=target: run.steps()[-1] >= target)
        if kill == KILLS:
            break
        time.sleep(rng.random() * 0.2)
        pids = run.pids()
        os.kill(pids[0], signal.SIGKILL)
        killed = time.monotonic()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() - killed < ORPHANS_END_S, "ranks are left"
            time.sleep(0.01)
        gone_s.append(round(time.monotonic() - killed, 2))
        run.launched.process.wait(WAIT_S)
        if saved := list_steps(checkpoints):
            assert check_folder(step_folder(checkpoints, saved[-1]), checksums=True) == []
        assert len(list(checkpoints.iterdir())) <= 5
        left = [
            path.name
            for path in tmp_path.iterdir()
            if path.name.startswith(("titanlite-", "torchelastic_"))
        ]
        assert len(left) == 1, "each start removes what the one before left"
        run, other = start(f"a{kill}"), start(f"b{kill}") if kill % TWO_STARTS_EVERY == 0 else None
    run.stop()
    assert not list(tmp_path.glob("titanlite-*"))
    assert {path.name for path in checkpoints.iterdir()} == {
        f"step-{step}" for step in list_steps(checkpoints)
    }
    print(
        f"{mode}: {KILLS} kills, {refused} second starts refused, all ranks were gone after "
        f"{max(gone_s)} s at most"
    )
