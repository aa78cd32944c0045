"""`python -m titanlite check --config FILE --world-size N`: every error of a configuration, before
anything starts.
"""

from collections.abc import Sequence

from titanlite.assemble import check_model
from titanlite.base.text import command, format_count
from titanlite.preflight import check_arguments


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the mesh of a run that passes its preflight; exit code 2 after one clear error.
    Downloads no weights.
    """
    checked = check_arguments(argv, weights=False)
    check_model(checked)
    print(f"OK on {format_count(checked.degrees.world_size, 'rank')}: {checked.degrees}")
    print("Not checked: rows (`titanlite data`), memory and time (`titanlite plan`), weights.")
