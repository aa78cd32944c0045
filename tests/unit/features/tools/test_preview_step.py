"""`python -m titanlite data --step N`: which samples it shows, and of which run."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from files import write_manifest
from unit.data.templates import CHATML

from titanlite.__main__ import main
from titanlite.checkpoint import Progress
from titanlite.checkpoint.train_state import STATE_FILE
from titanlite.config import load_config
from titanlite.config.schema import JobConfig
from titanlite.data.build import build_data
from titanlite.data.loader import TrainLoader
from titanlite.data.order import Stretch

_CONFIG = """
[job]
dump_folder = "{dump}"
[model]
name = "qwen3_moe"
flavor = "debug"
[training]
steps = 40
seq_len = 64
local_batch_size = 2
global_batch_size = 8
[data]
dataset = "examples"
path = "{path}"
tokenizer_path = "{tokenizer}"
cache_folder = "{cache}"
packing = false
"""


class Preview:
    """A configuration over 200 prompts, one to a sequence; the number of a row is in its text."""

    def __init__(self, job: JobConfig, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.dump, self.capsys, self.file = folder / "run", capsys, folder / "preview.toml"
        data = job.data
        self.file.write_text(
            _CONFIG.format(dump=self.dump, path=data.path, tokenizer=data.tokenizer_path, cache=data.cache_folder)
        )
        self.loader: TrainLoader = build_data(load_config(["--config", str(self.file)]), 0, 1)[1]

    def __call__(self, step: int, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output, error output."""
        code = main(["data", "--config", str(self.file), "--step", str(step), *arguments])
        return code, *self.capsys.readouterr()

    def lines(self, step: int, *arguments: str) -> list[int]:
        """Lines of rows.jsonl that the step trained on, in order."""
        code, out, err = self(step, *arguments)
        assert (code, err) == (0, "")
        return [int(line) for line in re.findall(r"^  document \d+: \S+rows\.jsonl, line (\d+), ", out, flags=re.M)]

    def order(self, start: int, stop: int) -> list[int]:
        """Lines of the samples [start, stop) of the data order."""
        dataset = self.loader.dataset
        indices = dataset.get_train_indices(self.loader.seed, start, stop).tolist()
        members = [dataset.get_members(index) for index in indices]
        return [int(part.examples.describe_place(part.selected[i[0]]).rpartition(" ")[2]) for part, i in members]

    def save(
        self,
        step: int,
        stretches: Sequence[Stretch],
        samples: int | None = None,
        world_size: int = 1,
    ) -> None:
        """A checkpoint without tensors."""
        folder = self.dump / f"checkpoint/step-{step}"
        folder.mkdir(parents=True)
        if samples is None:
            samples = stretches[-1].samples_before(step)
        data = self.loader.fingerprint
        progress = Progress(step, samples, data, world_size, {}, stretches=stretches)
        (folder / "titanlite").mkdir()
        (folder / STATE_FILE).write_bytes(progress.to_json())
        (folder / "model.safetensors").touch()
        write_manifest(folder)

    def stretch(self, step: int, samples: int, size: int = 8, data: str = "") -> Stretch:
        return Stretch(step, samples, size, data or self.loader.fingerprint)


@pytest.fixture
def preview(make_job: Callable[..., JobConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Preview:
    rows = [{"prompt": f"{i}\x1b[2J:", "completion": " what is" * (i % 5 + 1)} for i in range(200)]
    return Preview(make_job(rows, CHATML), tmp_path, capsys)


def test_a_run_without_checkpoints_is_in_the_plain_order(preview: Preview) -> None:
    assert preview.lines(1) == preview.order(0, 8)
    assert preview.lines(7) == preview.order(48, 56) != preview.lines(8)
    _, out, _ = preview(7, "--samples=2")
    assert f"as run     from its beginning, in the plain order: {preview.dump} has no checkpoint\n" in out
    assert f"  order      {preview.loader.fingerprint}\n" in out
    assert "  sequences  49 to 56 of that order, on 1 data rank\n" in out
    first = preview.order(48, 49)[0]
    tokens, trained = map(int, re.findall(rf"line {first}, (\d+) tokens, (\d+) trained", out)[0])
    assert 0 < trained < tokens
    assert (
        f"\nsequence 1 of 8 (data rank 0, micro-batch 0): 1 document, {tokens} of 64 tokens, {trained} trained\n" in out
    )
    assert "\nsequence 8 of 8 (data rank 0, micro-batch 3): " in out
    assert out.count(":[[ what is") == 2 and f"    {first - 1}\\x1b[2J:[[ what is" in out and "\x1b" not in out
    assert out.endswith("\nwithout the text of 6 documents: --samples 8 shows all\n")
    assert "without the text" not in preview(7, "--samples=8")[1]


def test_one_rank(preview: Preview) -> None:
    order = preview.order(16, 24)
    found = [preview.lines(3, "--world-size=2", f"--rank={rank}") for rank in (0, 1)]
    assert found == [order[0:2] + order[4:6], order[2:4] + order[6:8]]
    _, out, _ = preview(3, "--world-size=2", "--rank=1")
    assert re.findall(r"\nsequence (\d) of 8 \((.*?)\)", out) == [
        *(("3", "data rank 1, micro-batch 0"), ("4", "data rank 1, micro-batch 0")),
        *(("7", "data rank 1, micro-batch 1"), ("8", "data rank 1, micro-batch 1")),
    ]
    tp = ["--world-size=4", "--parallelism.tensor_parallel_degree=2", "--rank=2"]
    code, _, err = preview(3, *tp)
    assert code == 2 and err == (
        "titanlite: error: data: --rank 2 is none of the 2 data-parallel ranks of a world size of 4. Give 0 to 1, or "
        "another --world-size.\n"
    )


@pytest.mark.parametrize("step", [0, -3, 41])
def test_a_step_that_the_run_does_not_have(preview: Preview, step: int) -> None:
    assert preview(step) == (
        2,
        "",
        f"titanlite: error: data: --step {step} is not in [1, 40], the steps of this run (training.steps). Give one as "
        "the console counts them, or raise training.steps.\n",
    )
    assert preview.lines(40) == preview.order(39 * 8, 40 * 8)
    assert (preview(step, "--training.epochs=9")[0] == 0) == (step == 41)  # training.steps counts no more
    preview.save(41, [preview.stretch(0, 0)])  # training.steps was lowered since
    assert (preview(step)[0] == 0) == (step == 41)


@pytest.mark.parametrize("option", ["--rank=0"])
def test_options_of_a_step_need_one(preview: Preview, option: str) -> None:
    code = main(["data", "--config", str(preview.file), option])
    err = preview.capsys.readouterr().err
    assert code == 2 and f"data: {option.replace('=', ' ')} is about one step. Say which: --step N." in err


def test_texts_are_limited(preview: Preview) -> None:
    _, out, _ = preview(1, "--tokens=4", "--samples=1")
    assert re.search(r"\n    \.\.\. \d+ tokens, \d+ of them trained \.\.\.\n", out)
    assert "of them trained ..." not in preview(1)[1]


def test_a_run_that_was_resumed_with_another_batch_size(preview: Preview) -> None:
    stretches = [preview.stretch(0, 0), preview.stretch(10, 80, size=4)]
    preview.save(10, stretches[:1])
    preview.save(20, stretches, world_size=2)
    assert preview.lines(10) == preview.order(72, 80)
    assert preview.lines(11) == preview.order(80, 84)
    assert preview.lines(20) == preview.order(116, 120)
    assert preview.lines(21, "--training.global_batch_size=4") == preview.order(120, 124)
    _, out, _ = preview(11)
    assert f"  as run     {preview.dump} at step 20\n" in out and "on 2 data ranks" in out, "those of the checkpoint"
    assert "sequence 4 of 4 (data rank 1, micro-batch 0)" in out
    _, out, _ = preview(21)
    assert "  note       up to step 20 the run took 4 at a time\n" in out and "sequence 8 of 8 " in out
    _, out, _ = preview(11, "--world-size=4")
    assert "\nsequence 1 of 4: " in out, "4 ranks with 2 sequences each could not share 4"
    code, _, err = preview(11, "--world-size=4", "--rank=1")
    assert code == 2 and "data: step 11 had 4 sequences, which 4 data-parallel ranks of training.local_batch" in err
    assert preview.lines(11, "--checkpoint.load_step=10") == preview.order(80, 88), "as a run that goes on from there"
    assert preview.lines(11, "--checkpoint.load_step=0") == preview.order(80, 88)
    assert "in the plain order: no checkpoint is asked for\n" in preview(20, "--checkpoint.enable=false")[1]
    assert preview.lines(20, "--checkpoint.enable=false") == preview.order(152, 160)
    code, _, err = preview(11, "--checkpoint.load_step=15")
    assert code == 2 and "checkpoint.load_step = 15: " in err


def test_other_data_is_not_shown_for_what_was_trained_on(preview: Preview) -> None:
    preview.save(20, [preview.stretch(0, 0, data="data of before"), preview.stretch(10, 80)])
    assert preview.lines(11) == preview.order(80, 88)
    code, out, err = preview(10)
    assert (code, out) == (2, "") and err == (
        f"titanlite: error: data: step 10 trained on data of before, but this configuration has "
        f"{preview.loader.fingerprint}. Give the settings and files of that time. --checkpoint.load_step=0 shows the "
        "plain order of this configuration.\n"
    )
    code, out, _ = preview(21, "--training.seed=7")
    assert code == 0 and f"  note       up to step 20 the run had {preview.loader.fingerprint}\n" in out


def test_checkpoints_of_an_older_version_know_only_what_comes_next(preview: Preview) -> None:
    preview.save(20, (), samples=130)
    assert preview.lines(21) == preview.order(130, 138)
    code, _, err = preview(20)
    assert code == 2 and "do not say what the steps up to 20 trained on. --checkpoint.load_step=0" in err


def test_a_checkpoint_that_is_not_complete_is_passed_over_and_left_alone(preview: Preview) -> None:
    preview.save(10, [preview.stretch(0, 0)])
    preview.save(20, [preview.stretch(0, 5)])
    state = preview.dump / "checkpoint/step-20/titanlite/train_state.json"
    state.write_text("{}")
    left = preview.dump / "checkpoint/.step-30.tmp"
    left.mkdir()
    assert preview.lines(12) == preview.order(88, 96)
    assert state.read_text() == "{}" and left.is_dir()
    assert f"{preview.dump} at step 10\n" in preview(12)[1]


def test_a_stream_is_read_as_far_as_needed(preview: Preview) -> None:
    stream = ["--data.streaming=true", "--data.streaming_block_rows=16"]  # a sequence to a row, so 16 to a block
    blocks = [{(line - 1) // 16 for line in preview.lines(step, *stream)} for step in (9, 1, 2)]
    assert blocks == [{4}, {0}, {0}]
    assert sorted(preview.lines(1, *stream) + preview.lines(2, *stream)) == list(range(1, 17))
    assert "the stream is read up to there, which may take long\n" in preview(1, *stream)[1]


def test_pairs_and_corpora(preview: Preview, make_job: Callable[..., JobConfig], tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": " good", "rejected": " bad"} for i in range(90)]
    make_job(rows, CHATML)
    _, out, _ = preview(2, "--samples=2")
    assert "  document 1 (chosen): " in out and "  document 2 (rejected): " in out and "[[ bad<|endoftext|>]]" in out
    (tmp_path / "a.txt").write_text("what is the answer " * 2000)
    _, out, err = preview(2, "--data.dataset=text", f"--data.path={tmp_path / 'a.txt'}", "--data.packing=true")
    assert err == "" and re.search(rf"document 1: {tmp_path}/a\.txt, from token \d+ on, 64 tokens, 64 trained\n", out)
