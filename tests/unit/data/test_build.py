import pytest

from titanlite.assemble import build_data
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import build_corpus
from titanlite.data.tokenizer import build_tokenizer


@pytest.fixture
def job(data):
    job = JobConfig(data=data)
    job.training.seq_len = 16
    job.training.local_batch_size = 2
    return job


def test_tokenizer_of_the_pretrained_model_is_used(job, tmp_path, caplog):
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


def test_the_bpe_has_the_form_of_the_model(job, tmp_path):
    def splits_digits():
        return (
            len(build_data(job, 0, 1)[0].backend_tokenizer.pre_tokenizer.pre_tokenize_str("123"))
            == 3
        )

    job.model.name = "llama"
    assert not splits_digits()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    job.model.hf_assets_path = str(tmp_path)
    assert splits_digits()
