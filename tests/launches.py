"""The real launcher with real ranks, as a user starts them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from processes import kill_tree

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240  # 10 s on 2 idle cores


def variables_of(pid: int) -> dict[str, str]:
    """The environment that the process was started with."""
    return dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))


class Launch:
    """`titanlite.launch` with 2 ranks on the tiny model, which train until they are told to stop.

    Args:
        config: of the run.
        folder: for its outputs; the run's own is `run` in it.
        overrides: of settings.
        options: of the launcher.
        variables: of the environment, beside those of the tests.
    """

    def __init__(
        self,
        config: Path,
        folder: Path,
        *overrides: str,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        arguments = [
            sys.executable,
            "-m",
            "titanlite.launch",
            "--standalone",
            "--nproc-per-node=2",
            *options,
        ]
        arguments += ["-m", "titanlite.rank", "--config", str(config), "--training.steps=100000"]
        arguments += [f"--job.dump_folder={folder / 'run'}", *overrides]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
        }
        environment |= variables or {}
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=out, stderr=err, process_group=0
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def errors(self) -> list[str]:
        return (self.folder / "err").read_text().splitlines()

    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"step +(\d+)/100000 ", self.out)]

    def wait_for(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, (self.out, self.errors)
            time.sleep(0.02)

    def rank_pids(self) -> list[int]:
        """Processes of the ranks, in their order."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    found[int(variables_of(int(path.name))["RANK"])] = int(path.name)
            except (OSError, KeyError):
                continue  # gone since, or no rank
        return [found[rank] for rank in sorted(found)]

    def end(self, timeout_s: float) -> int:
        """The exit code; a launcher or rank that is still there after `timeout_s` fails."""
        pids = self.rank_pids()
        code = self.process.wait(timeout_s)
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == [], "all ranks are gone"
        return code

    def kill(self) -> None:
        kill_tree(self.process.pid)
        self.process.wait()
