from pathlib import Path

import pytest

from titanlite.logger import log_to_folder, logger, setup_logger


@pytest.fixture(autouse=True)
def rank_0(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")


def test_the_log_file_has_the_lines_from_before_it_was_known_and_a_resumed_run_appends(tmp_path: Path, capsys):
    setup_logger()
    logger.info("early")
    log_to_folder(tmp_path)
    logger.warning("later, %d of it", 2)
    log_to_folder(tmp_path)
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith(" early") and second.endswith(" WARNING later, 2 of it")
    assert capsys.readouterr().out.count("\n") == 2


def test_other_ranks_keep_no_file(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    setup_logger()
    log_to_folder(tmp_path)
    logger.warning("said on the console only")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_costs_one_warning_and_gets_its_lines_later(tmp_path: Path, capsys):
    (tmp_path / "run").write_text("")
    setup_logger()
    log_to_folder(tmp_path / "run")
    logger.info("one")
    logger.info("two")
    (tmp_path / "run").unlink()
    logger.info("three")
    out = capsys.readouterr().out
    assert out.count("cannot write") == 1 and out.splitlines()[-1].endswith(" three")
    written = [line.split(" ", 2)[2] for line in (tmp_path / "run/log.txt").read_text().splitlines()]
    assert written[0].startswith("WARNING cannot write") and written[1:] == ["one", "two", "three"]
