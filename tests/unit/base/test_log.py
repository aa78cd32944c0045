import os
import re
import subprocess
import sys

import pytest

from titanlite.base.log import log_to_folder, logger, setup_logger
from titanlite.base.process import escape_controls


@pytest.fixture(autouse=True)
def rank_0(monkeypatch):
    monkeypatch.setenv("RANK", "0")


def test_the_log_file_has_the_lines_from_before_it_was_known_and_a_resumed_run_appends(
    tmp_path, capsys
):
    setup_logger()
    logger.info("early")
    log_to_folder(tmp_path)
    logger.warning("later, %d of it", 2)
    log_to_folder(tmp_path)
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith(" early") and second.endswith(" WARNING later, 2 of it")
    assert capsys.readouterr().out.count("\n") == 2


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    setup_logger()
    log_to_folder(tmp_path / "run")
    logger.info("one")
    logger.info("two")
    out, err = capsys.readouterr()
    assert (
        err.startswith(f"titanlite: cannot write {tmp_path / 'run'}/log.txt: ")
        and err.count("cannot write") == 1
    )
    assert [line.split(" ", 1)[1] for line in out.splitlines()] == ["one", "two"]


EVIL = "\x1b[2Ja\x07\x9bb\r\u202ec\u2066d\x7f\u2028e\x00 \u00e9\u4e2d\ttab"
# What speaks, in a process that has nothing but the console between it and the terminal.
SPEAKERS = """
import sys, warnings
from titanlite.base.log import logger, setup_logger
from titanlite.__main__ import main
text = {0}
print(text, file=sys.stderr)
warnings.warn(text)
setup_logger()
logger.warning(text)
main([text])
raise ValueError(text)
"""


def run(code, *, stdout="", **environment):
    script = (
        "from titanlite.base.process import "
        f"open_console\nopen_console(lossy={bool(stdout)})\n{code}"
    )
    command = [sys.executable, "-c", script]
    if stdout:
        command = ["bash", "-c", f'exec "$@" {stdout}', "bash", *command]
    return subprocess.run(
        command, capture_output=True, check=False, timeout=60, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_control_character_reaches_the_terminal(encoding):
    """Neither as bytes nor, where the terminal is ASCII, as an error of encoding."""
    done = run(SPEAKERS.format(ascii(EVIL)), PYTHONIOENCODING=encoding)
    said = (done.stdout + done.stderr).decode(encoding)
    assert said.count("\\x1b") >= 5 and "\x1b" not in said
    assert (
        re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said) is None
    )
    assert "UnicodeEncodeError" not in said and "Logging error" not in said


def test_text_in_any_script_is_left_as_it_is():
    text = "tab\t newline\n \u00e9 \u4e2d\u6587 \U0001f468\u200d\U0001f469 \u0645\u0646 na\u00efve"
    assert escape_controls(text) == text
    assert run(f"print({text!a})", PYTHONIOENCODING="utf-8").stdout.decode() == text + "\n"


def test_progress_bars_still_draw_over_their_line():
    code = (
        "import sys\nfor i in range(3): sys.stderr.write(f'\\r{i} %'); sys.stderr.write('\\r    "
        "\\r')"
    )
    assert run(code).stderr == b"\r0 %\r    \r\r1 %\r    \r\r2 %\r    \r"
    code = (
        "import sys; from titanlite.base.process import raw_output; "
        "raw_output().write('\\x1b[1mbold')"
    )
    assert run(code).stdout == b"\x1b[1mbold"


@pytest.mark.parametrize("stdout", [">/dev/full", "| true"])
def test_a_run_outlives_its_console(tmp_path, stdout):
    """Full or not read any more: no traceback, and no line of the log is lost."""
    code = f"""
import time
time.sleep(0.5)
from titanlite.base.log import log_to_folder, logger, setup_logger
from pathlib import Path
setup_logger()
log_to_folder(Path({str(tmp_path)!r}))
for i in range(3000):
    logger.info("line %d", i)
    print("said", flush=True)
Path({str(tmp_path / "done")!r}).touch()
"""
    done = run(code, stdout=stdout)
    assert (tmp_path / "done").exists()
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3000
    assert b"Traceback" not in done.stderr and b"Logging error" not in done.stderr
