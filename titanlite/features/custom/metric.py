"""A function of the user's that makes more values of a point of training."""

from collections.abc import Callable, Mapping
from typing import SupportsFloat

from titanlite.base.errors import TrainingError
from titanlite.base.extension import load_extension
from titanlite.config.schema import MetricsSection
from titanlite.metrics import StepPoint


def build_metric(section: MetricsSection) -> Callable[[StepPoint], Mapping[str, float]]:
    """Return the function of `metrics.function`, whose values are logged as metric/NAME; nothing without one.

    Raises:
        ConfigError: it cannot be imported.
        TrainingError: when called: it raises something, or returns something else than a dictionary of numbers.
    """
    if not section.function:
        return lambda point: {}
    function, where = load_extension("metrics.function", section.function, ["point"]), f"'{section.function}'"

    def measure(point: StepPoint) -> Mapping[str, float]:
        try:
            found = function(point)
        except Exception as error:
            raise TrainingError(
                f"metrics.function {where} raised {type(error).__name__}: {error}. Correct it, or leave it out."
            ) from error
        if not isinstance(found, Mapping) or not all(isinstance(value, SupportsFloat) for value in found.values()):
            raise TrainingError(f"metrics.function {where} returned {found!r}. Return a dictionary of numbers.")
        return {f"metric/{name}": float(value) for name, value in found.items()}

    return measure
