"""What is looked at when a run is set up."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from files import write_json

from titanlite.assemble import fit_vocabulary
from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.data.loader import TrainLoader, resolve_steps
from titanlite.data.tokenizer import check_vocabulary
from titanlite.distributed.parallelize import check_device, choose_attention
from titanlite.features.dpo import turn_off_dropout
from titanlite.features.sft.chat_template import with_chat_date
from titanlite.models.families import families, resolve_model_config

CONFIG = replace(families()["qwen3_moe"].presets["debug"], vocab_size=1000)


def test_a_tokenizer_that_does_not_fit_the_embedding_is_said(caplog):
    check_vocabulary(JobConfig(), 500, 500, CONFIG)
    # few ids in the data, of a tokenizer of the model's size
    check_vocabulary(JobConfig(), 8, 500, CONFIG)
    assert not caplog.messages
    check_vocabulary(JobConfig(), 499, 499, CONFIG)
    assert "the tokenizer has 499 tokens, the embedding 1000 rows" in caplog.messages[-1]
    # the data does not use its new tokens: whoever has the model may
    check_vocabulary(JobConfig(), 990, 1003, CONFIG)
    assert (
        "the tokenizer has 1003 tokens, but the model's vocab_size is 1000." in caplog.messages[-1]
    )
    (problem,) = check_vocabulary(JobConfig(), 1001, 1001, CONFIG)
    assert re.search(r"has 1001 tokens.*set model.overrides.vocab_size = 1001", problem)


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "head_dim", "expected"),
    [
        ("auto", "auto", "cuda", 128, "varlen"),
        ("auto", "auto", "cpu", 128, "sdpa"),
        ("auto", "float32", "cuda", 128, "sdpa"),
        ("auto", "auto", "cuda", 264, "sdpa"),
        ("sdpa", "auto", "cuda", 128, "sdpa"),
    ],
)
def test_attention_by_default_is_flash_where_it_can_be(
    monkeypatch, backend, dtype, device, head_dim, expected
):
    job, config = JobConfig(), replace(CONFIG, head_dim=head_dim)
    job.model.attention_backend, job.training.mixed_precision_param = backend, dtype
    assert choose_attention(job, config, device) == expected, "planned on a machine without a GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((9, 0), (7, 5)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda capability=capability: capability
        )
        old = capability < (8, 0) and expected == "varlen"
        assert choose_attention(job, config, device) == ("sdpa" if old else expected)


def test_attention_that_a_device_does_not_have():
    job = JobConfig()
    job.model.attention_backend = "varlen"
    for dtype, device, words in [
        ("bfloat16", "cpu", r"bfloat16 on cpu\. Set it to 'sdpa'\."),
        ("float32", "cuda", r"float32 on cuda\. Set it to 'sdpa', or training\."),
    ]:
        job.training.mixed_precision_param = dtype
        (problem,) = check_device(job, torch.device(device))
        assert re.search(r"^model\.attention_backend: .*" + words, problem)
    job.training.enable_cpu_offload = True
    assert len(check_device(job, torch.device("cpu"))) == 2, "all of them at once"


def test_dpo_turns_off_dropout_wherever_it_is():
    model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Module())
    model[1].attention_dropout, model[1].dropout, model[1].p = 0.1, 0.05, 7.0
    turn_off_dropout(model)
    found = model[0].p, model[1].attention_dropout, model[1].dropout, model[1].p
    assert found == (0.0, 0.0, 0.0, 7.0)


def make_loader():
    dataset = SimpleNamespace(num_train_sequences=100, fingerprint="")
    return TrainLoader(
        dataset, seed=1, global_batch_size=8, local_batch_size=1, dp_rank=0, dp_degree=1
    )  # type: ignore[arg-type]


def test_a_run_with_another_batch_trains_all_its_epochs():
    job = JobConfig()
    job.training.seq_len = 2048
    job.training.epochs = 4.0
    before = SimpleNamespace(step=50, samples=100)  # two sequences a step
    # 300 of 400 are left, 8 a step
    assert resolve_steps(job, make_loader(), before).training.steps == 50 + 38
    job.data.skip_to_sample = 200
    assert resolve_steps(job, make_loader(), before).training.steps == 50


def test_epochs_are_steps():
    job = JobConfig()
    job.training.seq_len = 1000
    for epochs, steps in [(0.0, 600), (1.0, 13), (3.0, 38), (0.5, 7), (0.01, 1)]:
        job.training.steps, job.training.epochs = 600, epochs
        # 100 sequences, 8 in a step
        assert resolve_steps(job, make_loader()).training.steps == steps
        assert job.training.steps == 600, "the caller's own is as it was"


def test_a_resumed_run_keeps_the_date_of_its_chats(tmp_path):
    start = SimpleNamespace(progress=SimpleNamespace(chat_date="2024-05-06"))
    job = JobConfig()
    job.job.dump_folder, job.data.dataset, job.checkpoint.enable = str(tmp_path), "examples", True
    assert with_chat_date(job, start).data.chat_date == "2024-05-06"
    job.data.chat_date = "2023-01-02"
    assert with_chat_date(job, start).data.chat_date == "2023-01-02"


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_the_vocabulary_of_a_new_model_follows_the_tokenizer(implementation):
    job = JobConfig()
    job.model = replace(job.model, name="qwen3", flavor="debug", implementation=implementation)
    preset = resolve_model_config(job.model)
    assert preset.vocab_size == 2048
    for num_ids, rows in [(1023, 1023), (1024, 2048), (2048, 2048), (2049, 2049)]:
        followed, config = fit_vocabulary(job, preset, num_ids, 1, None)
        assert config.vocab_size == rows
        assert config == replace(preset, vocab_size=rows) or implementation == "transformers"
        assert fit_vocabulary(followed, config, num_ids, 1, None) == (followed, config)


def test_a_vocabulary_that_is_written_or_trained_stays(tmp_path):
    job = JobConfig()
    job.model = replace(job.model, name="qwen3", flavor="debug")
    preset = resolve_model_config(job.model)
    written = replace(
        job, model=replace(job.model, overrides=replace(job.model.overrides, vocab_size=5000))
    )
    sizes = resolve_model_config(written.model)
    assert fit_vocabulary(written, sizes, 300, 1, None) == (written, sizes)
    loaded = replace(job, checkpoint=replace(job.checkpoint, initial_load_path="model"))
    assert fit_vocabulary(loaded, preset, 300, 1, None) == (loaded, preset)
    with pytest.raises(
        ConfigError, match=r"301 tokens.*tensor_parallel_degree = 4\. Set .*vocab_size = 304\."
    ):
        fit_vocabulary(job, preset, 301, 4, None)
    saved = tmp_path / "checkpoint/step-7"
    saved.mkdir(parents=True)
    write_json(saved / "config.json", {"vocab_size": 2048})
    resumed = replace(job, job=replace(job.job, dump_folder=str(tmp_path)))
    assert fit_vocabulary(resumed, preset, 300, 1, SimpleNamespace(folder=saved)) == (
        resumed,
        preset,
    )
