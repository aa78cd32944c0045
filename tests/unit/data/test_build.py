import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import titanlite
from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.data import DataSection
from titanlite.config.schema import JobConfig
from titanlite.data import build_corpus
from titanlite.data import corpus as corpus_module
from titanlite.data.tokenizer import build_tokenizer


@pytest.fixture
def job(data: DataSection) -> JobConfig:
    job = JobConfig(data=data)
    job.training.seq_len = 16
    job.training.local_batch_size = 2
    return job


def test_build_data_from_config(job: JobConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="titanlite")
    tokenizer, loader = build_data(job, dp_rank=1, dp_degree=3)
    assert (loader.global_batch_size, loader.num_micro_batches, loader.dp_rank, loader.seed) == (6, 1, 1, 42)
    (batch,) = loader.micro_batches(0)
    assert batch.tokens.shape == (2, 16)
    dataset = loader.dataset
    text = tokenizer.decode(dataset.tokenized.tokens.tolist())
    assert text == "".join(document + tokenizer.eos_token for _, document in build_corpus(job.data))
    assert (
        f"data: {len(dataset.tokenized.tokens)} tokens, vocabulary 300, in 40 documents; sequences of 16 tokens: "
        f"{dataset.num_train_sequences} to train on, {dataset.num_validation_sequences} held out"
    ) in caplog.text
    assert "validation.steps" not in caplog.text


def test_global_batch_size_gives_accumulation(job: JobConfig) -> None:
    job.training.global_batch_size = 12
    assert build_data(job, 0, 3)[1].num_micro_batches == 2


def test_what_a_validation_leaves_out_and_costs_is_said(job: JobConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="titanlite")
    job.validation.enable = True
    num_held_out = build_data(job, 0, 1)[1].dataset.num_validation_sequences
    assert "validation" not in caplog.text, "all of them, in fewer batches than are trained on in between"
    job.validation.steps, job.validation.freq = 3, 2
    build_data(job, 0, 1)
    assert f"data: each validation takes the first 6 of {num_held_out} held-out sequences: validation.steps = 3" in (
        caplog.text
    )
    assert "data: a validation runs 3 batches, after every 2 that are trained on (validation.freq)" in caplog.text


def test_too_little_text(job: JobConfig) -> None:
    job.training.seq_len = 10**6
    with pytest.raises(DataError, match=r"training\.seq_len \(1000000\), but 1 is needed"):
        build_data(job, 0, 1)


def test_tokenizer_of_the_pretrained_model_is_used(
    job: JobConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="titanlite")
    job.data.bpe_vocab_size = 280
    build_tokenizer(job.data, build_corpus(job.data)).save_pretrained(tmp_path / "assets")
    job.data.bpe_vocab_size = 300
    job.model.hf_assets_path = str(tmp_path)  # no tokenizer.json there
    assert len(build_data(job, 0, 1)[0]) == 300
    job.model.hf_assets_path = str(tmp_path / "assets")
    assert len(build_data(job, 0, 1)[0]) == 280
    assert f"data: using the tokenizer in {tmp_path}/assets" in caplog.text
    assert job.data.tokenizer_path == ""  # the configuration is left as it was


@pytest.mark.parametrize("load_step", [-1, 7, 0])
def test_a_resumed_run_keeps_the_tokenizer_that_it_was_begun_with(job: JobConfig, tmp_path: Path, load_step) -> None:
    """Even if this version would train another one: of another form, or of another size."""
    job.job.dump_folder, job.checkpoint.enable, job.checkpoint.load_step = str(tmp_path / "run"), True, load_step
    job.data.validation_share = 0.1  # not set, the folders would have to be whole
    for step, size in ((7, 270), (12, 290)):
        job.data.bpe_vocab_size = size
        folder = tmp_path / "run" / job.checkpoint.folder / f"step-{step}"
        build_tokenizer(job.data, build_corpus(job.data)).save_pretrained(folder)
    job.data.bpe_vocab_size = 300
    tokenizer, loader = build_data(job, 0, 1)
    assert (len(tokenizer), loader.dataset.vocab_size) == ({-1: 290, 7: 270, 0: 300}[load_step],) * 2
    splits_digits = len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123")) == 3
    assert splits_digits == (load_step == 0), "qwen3_moe's form, if it is trained"
    job.checkpoint.enable = False
    assert len(build_data(job, 0, 1)[0]) == 300


def test_the_tokenizer_of_a_damaged_checkpoint_is_not_taken(job: JobConfig, tmp_path: Path) -> None:
    job.job.dump_folder, job.checkpoint.enable = str(tmp_path / "run"), True
    folder = tmp_path / "run" / job.checkpoint.folder
    for name, size in (("step-7", 270), ("step-9", 280), ("step-12.damaged", 290)):
        job.data.bpe_vocab_size = size
        build_tokenizer(job.data, build_corpus(job.data)).save_pretrained(folder / name)
    (folder / "step-9" / "tokenizer.json").write_text("{")
    assert len(build_data(job, 0, 1)[0]) == 270


def test_the_bpe_has_the_form_of_the_model(job: JobConfig, tmp_path: Path) -> None:
    def splits_digits() -> bool:
        return len(build_data(job, 0, 1)[0].backend_tokenizer.pre_tokenizer.pre_tokenize_str("123")) == 3

    job.model.name = "llama"
    assert not splits_digits()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    job.model.hf_assets_path = str(tmp_path)
    assert splits_digits()


def test_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the real data of the default configuration. The quick start in test_end_to_end.py has all of it."""
    corpus = corpus_module.build_stdlib_corpus()
    monkeypatch.setattr(corpus_module, "build_stdlib_corpus", lambda: replace(corpus, files=corpus.files[::8]))
    job = JobConfig(data=DataSection(cache_folder=str(tmp_path), bpe_vocab_size=512))
    _, loader = build_data(job, 0, 1)
    assert loader.dataset.num_train_sequences > 125
    assert loader.dataset.tokenized.vocab_size == 512
    assert loader.dataset.tokenized.num_documents > 40


def test_import_does_not_import_transformers() -> None:
    script = "import sys, titanlite.data; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=Path(titanlite.__file__).parents[1], check=True)
