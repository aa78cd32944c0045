import pytest
from files import read_lines

from titanlite.base import events
from titanlite.base.events import open_events, record_event


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    monkeypatch.setattr(events, "_state", {})


def test_events_are_appended_as_lines(tmp_path):
    record_event("start", "nobody listens yet", 0)
    for step in (3, 7):
        open_events(tmp_path)  # as a resumed run does
        record_event("save", 'a "quoted" \u00e9vent\nof two lines', step)
    first, second = read_lines(tmp_path / "events.jsonl")
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 3, "kind": "save", "text": 'a "quoted" \u00e9vent\nof two lines'}
    assert second["step"] == 7


def test_a_file_that_cannot_be_written_is_a_warning_with_the_event_which_is_written_later(
    tmp_path, caplog
):
    (tmp_path / "run").write_text("")
    open_events(tmp_path / "run")
    record_event("skip", "step 5 was skipped", 5)
    (warning,) = caplog.messages
    assert "cannot write" in warning and "step 5 was skipped" in warning
    (tmp_path / "run").unlink()
    record_event("save", "step 6 was saved", 6)
    kinds = [event["kind"] for event in read_lines(tmp_path / "run/events.jsonl")]
    assert kinds == ["skip", "save"]
