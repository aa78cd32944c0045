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
    assert (loader.global_batch_size, loader.num_micro_batches, loader.dp_rank, loader.seed) == (
        6,
        1,
        1,
        42,
    )
    (batch,) = loader.micro_batches(0)
    assert batch.tokens.shape == (2, 16)
    dataset = loader.dataset
    text = tokenizer.decode(dataset.tokenized.tokens.tolist())
    assert text == "".join(document + tokenizer.eos_token for _, document in build_corpus(job.data))
    assert (
        f"data: {len(dataset.tokenized.tokens)} tokens, vocabulary 300, in 40 documents; sequences "
        f"of 16 tokens: {dataset.num_train_sequences} to train on, "
        f"{dataset.num_validation_sequences} held out"
    ) in caplog.text
    assert "validation.steps" not in caplog.text


def test_global_batch_size_gives_accumulation(job: JobConfig) -> None:
    job.training.global_batch_size = 12
    assert build_data(job, 0, 3)[1].num_micro_batches == 2


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


def test_the_bpe_has_the_form_of_the_model(job: JobConfig, tmp_path: Path) -> None:
    def splits_digits() -> bool:
        return (
            len(build_data(job, 0, 1)[0].backend_tokenizer.pre_tokenizer.pre_tokenize_str("123"))
            == 3
        )

    job.model.name = "llama"
    assert not splits_digits()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    job.model.hf_assets_path = str(tmp_path)
    assert splits_digits()


def test_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the real data of the default configuration. The quick start in
    test_end_to_end.py has all of it.
    """
    corpus = corpus_module.build_stdlib_corpus()
    monkeypatch.setattr(
        corpus_module, "build_stdlib_corpus", lambda: replace(corpus, files=corpus.files[::8])
    )
    job = JobConfig(data=DataSection(cache_folder=str(tmp_path), bpe_vocab_size=512))
    _, loader = build_data(job, 0, 1)
    assert loader.dataset.num_train_sequences > 125
    assert loader.dataset.tokenized.vocab_size == 512
    assert loader.dataset.tokenized.num_documents > 40


def test_import_does_not_import_transformers() -> None:
    script = "import sys, titanlite.data; assert 'transformers' not in sys.modules"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=Path(titanlite.__file__).parents[1],
        check=True,
    )
