"""`python -m titanlite report RUN`: one self-contained HTML page on a run, from the files in its folder."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.base.command_line import Parser, command
from titanlite.base.errors import TitanliteError
from titanlite.base.files import replace_file
from titanlite.features.report.read import read_run


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the page; exit code 0, or 2 after one clear error."""
    parser = Parser(
        "report",
        "Write one HTML page on a run: plots, expert load, ranks, plan, configuration, environment, "
        "events. It loads nothing from a network, so it can be mailed or kept with the run. Needs bokeh: "
        "pip install 'bokeh>=3.9'.",
    )
    parser.add_argument("run", type=Path, help="folder of the run (job.dump_folder)")
    parser.add_argument("--output", type=Path, help="file to write (default: report.html in the run's folder)")
    known = parser.parse_args(argv)
    output = known.output or known.run / "report.html"
    if importlib.util.find_spec("bokeh") is None:
        raise TitanliteError(
            f"report: the plots need bokeh, and {sys.executable} has no package 'bokeh'. Install it, the extra "
            f"titanlite[report]: `{sys.executable} -m pip install 'bokeh>=3.9'`."
        )
    from titanlite.features.report.page import render_page

    run = read_run(known.run)
    page = render_page(run)
    try:
        replace_file(output, page)
    except OSError as error:
        raise TitanliteError(
            f"report: cannot write {output}: {error.strerror or error}. Choose another file with --output."
        ) from error
    for problem in run.problems:
        print(f"titanlite: warning: {run.name}: {problem}", file=sys.stderr)
    print(f"{output} ({len(page.encode()) / 1024:,.0f} KiB)")
