"""torchrun's agent with `titanlite.launch.guard` beside it. Everything here that torch may change is in this file.

The agent's methods with a leading underscore are those that torch documents for subclasses; `_remaining_restarts` is
not among them, and is read and set here only.
"""

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from titanlite.launch.guard import Guard
from titanlite.launch.notices import forget_last_start


# torch's decorators hide the signatures of these methods, hence the ignored reports.
class Agent(LocalElasticAgent):
    """Starts the ranks of this machine, and again where that helps; ends them all when one fails or hangs.

    Args:
        guard: decides, and remembers what happened.
        folder: that the launcher shares with its ranks.
        options: of torch's agent.
    """

    def __init__(self, guard: Guard, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self._guard, self._folder = guard, folder

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        forget_last_start(self._folder)
        self._guard.began()
        return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._pcontext is not None:
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            pids = self._pcontext.pids()
            self._guard.watch({ranks[local]: pid for local, pid in pids.items() if local in ranks})
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            for rank, failure in sorted(result.failures.items(), key=lambda item: item[1].timestamp):
                self._guard.note_failure(rank, failure.exitcode)
            most = worker_group.spec.max_restarts
            if not self._guard.wants_restart(most - self._remaining_restarts, most):
                self._remaining_restarts = 0
        return result
