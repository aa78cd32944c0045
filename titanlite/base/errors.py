"""Errors for the user: `<where>: <what is wrong, with every number and name>. <what to do>.`

Problems are collected and raised once, on all ranks, so that no rank waits for the others.
"""

from collections.abc import Iterable

# Environment variable: a folder in which the ranks of a launch agree which of them prints an error
# that all of them have.
NOTICE_FOLDER = "TITANLITE_NOTICE_FOLDER"
# Environment variable: endpoint and id of the rendezvous of a run's machines, if the run may lose
# machines.
RENDEZVOUS = "TITANLITE_RENDEZVOUS"
# Exit codes after which a launcher does not start the ranks again, because they would fail in the
# same way.
NEVER_RESTARTED = (2,)
_MOST_LISTED = 1000  # a wrong checkpoint may have an error in each of its 18,867 tensors


class TitanliteError(Exception):
    """A problem that the user can fix. Its text is the whole message; no traceback is needed to act
    on it.
    """

    exit_code = 2  # of the rank that it ends; 3 if a restart from the last checkpoint may succeed


class ConfigError(TitanliteError):
    """A configuration file, an override, or a combination of settings is wrong."""


class DataError(TitanliteError):
    """A dataset or tokenizer is missing, unreadable, or does not fit the model."""


class PlanError(TitanliteError):
    """The materialization plan has tensors without a source, with two sources, or with a source
    that does not fit.
    """


class VerifyError(TitanliteError):
    """After materialization a tensor is still on meta, poisoned, non-finite, untied, or differs
    between replicas.
    """


class CheckpointError(TitanliteError):
    """A checkpoint folder cannot be read or written."""


class TrainingError(TitanliteError):
    """Training cannot continue: a loss or gradient is not finite, or memory ran out."""


class TransientError(TrainingError):
    """Training cannot continue, but a restart from the last checkpoint may: a machine failed, not
    the run.
    """

    exit_code = 3


def raise_problems(error: type[TitanliteError], where: str, problems: Iterable[str]) -> None:
    """Raise one `error` that lists `problems` in order, at most 1,000 of them; do nothing if there
    are none.

    A single problem reads `where: problem`; several read `where: N problems:` with one indented
    line each.
    """
    problems = list(problems)
    if len(problems) == 1:
        raise error(f"{where}: {problems[0]}")
    if problems:
        listed = problems[:_MOST_LISTED]
        if len(problems) > _MOST_LISTED:
            listed.append(f"and {len(problems) - _MOST_LISTED:,} more.")
        raise error("\n  ".join([f"{where}: {len(problems)} problems:", *listed]))
