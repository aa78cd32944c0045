"""Range checks: what passes, what is refused and in which words."""

from typing import Any

import pytest

from titanlite.config import JobConfig
from titanlite.config.check import check_values, find_ignored
from titanlite.config.settings import format_value


def make_job(**values: Any) -> JobConfig:
    """A job without problems, then `section__name=value`."""
    job = JobConfig()
    job.model.flavor = "30B-A3B"
    for key, value in values.items():
        section, _, name = key.rpartition("__")
        assert hasattr(getattr(job, section), name), key
        setattr(getattr(job, section), name, value)
    return job


def find(**values: Any) -> list[str]:
    """The problems of the values of `make_job`, which are all that is given."""
    job = make_job(**values)
    given = dict.fromkeys((key.replace("__", ".") for key in values), "x.toml")
    return [text for _, text in (*check_values(job), *find_ignored(job, given))]


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("training.steps", [0, 1], [-1]),
        ("training.seq_len", [1, -1], [0, -2]),
        ("training.global_batch_size", [-1, 1], [0, -2]),
        ("training.max_norm", [0.0, 1.0], [-0.1, float("nan"), float("inf")]),
        ("optimizer.lr", [1e-9, 1.0], [0.0, 5.0, float("nan")]),
        ("optimizer.beta2", [0.0, 0.999], [1.0, -0.1]),
        ("optimizer.eps", [1e-30], [0.0, -1e-8]),
        ("lr_scheduler.warmup_steps", [0, -1], [-2]),
        ("lr_scheduler.decay_ratio", [None, 0.1, 1.0], [0.0, 1.1]),
        ("parallelism.data_parallel_shard_degree", [-1, 1], [0, -2]),
        (
            "activation_checkpoint.selective_ac_option",
            ["op", "1", "12"],
            ["", "0", "-1", "1.5", "ops", "01", "2\n"],
        ),
        ("data.bpe_vocab_size", [257], [256]),
    ],
)
def test_range_is_enforced_at_its_ends(key: str, good: list[Any], bad: list[Any]) -> None:
    name = key.replace(".", "__")
    for value in good:
        assert find(**{name: value}, activation_checkpoint__mode="selective") == []
    for value in bad:
        problems = find(**{name: value}, activation_checkpoint__mode="selective")
        assert len(problems) == 1, value
        assert problems[0].startswith(f"{key} = {format_value(value)} is ")


def test_there_is_a_model() -> None:
    assert [text for _, text in check_values(JobConfig())] == [
        "model.path and model.flavor are both empty, so there is no model. Set model.path to a "
        "folder or hub id, or model.name and model.flavor for a new model with random weights."
    ]
    assert find(model__flavor="", model__hf_assets_path="assets") == []
    assert find(model__hf_assets_path="assets") == [], (
        "the tokenizer of one, the sizes of the other"
    )


def test_text_dataset_needs_a_path() -> None:
    assert find(data__dataset="text") == [
        'data.dataset = "text" needs data.path, which is empty. Set it to a text file or a folder.'
    ]
    assert find(data__dataset="text", data__path="corpus.txt") == []


EXAMPLES = {"data__dataset": "examples", "data__path": "rows.jsonl"}


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        (
            {"activation_checkpoint__selective_ac_option": "3"},
            "activation_checkpoint.selective_ac_option",
        ),
        ({"optimizer__momentum": 0.9}, "optimizer.momentum"),
        ({"parallelism__pipeline_parallel_layers": "28"}, "parallelism.pipeline_parallel_layers"),
        (
            {"checkpoint__enable": False, "checkpoint__push_to_hub": "a/b"},
            "checkpoint.push_to_hub",
        ),
        ({"lora__alpha": 16.0}, "lora.alpha"),
        ({"dpo__beta": 0.1}, "dpo.beta"),
        ({"validation__freq": 5}, "validation.freq"),
        ({"evaluation__enable": True, "evaluation__split": "test"}, "evaluation.split"),
        ({"metrics__wandb_project": "x"}, "metrics.wandb_project"),
        ({"profiling__profile_freq": 5}, "profiling.profile_freq"),
        ({**EXAMPLES, "data__split": "test"}, "data.split"),
        (
            {**EXAMPLES, "data__text_field": "content", "data__format": "messages"},
            "data.text_field",
        ),
        ({"data__train_on": "all"}, "data.train_on"),
        ({**EXAMPLES, "data__document_separator": "none"}, "data.document_separator"),
        ({**EXAMPLES, "data__subset": "de"}, "data.subset"),
        (
            {**EXAMPLES, "data__path": "a/b", "data__validation_split": "test"},
            "data.validation_split",
        ),
        (
            {**EXAMPLES, "data__validation_path": "b.jsonl", "data__validation_split": "test"},
            "data.validation_split",
        ),
        ({**EXAMPLES, "data__streaming_block_rows": 64}, "data.streaming_block_rows"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(settings: dict[str, Any], ignored: str) -> None:
    (problem,) = find(**settings)
    assert problem.startswith(f"{ignored} has no effect without ")
    assert problem.endswith(f" Set that, or remove {ignored}.")


def test_settings_of_the_hub_and_of_streams_are_taken_there() -> None:
    hub = {**EXAMPLES, "data__path": "a/b@v1", "data__split": "test", "data__subset": "de"}
    assert find(**hub, data__validation_path="a/b", data__validation_split="dev") == []
    assert find(**EXAMPLES, data__streaming=True, data__streaming_block_rows=64) == []


def test_rows_are_held_out_where_someone_wants_them() -> None:
    assert find(data__validation_share=0.0) == find(data__validation_share=0.1) == []
    for other in ({"data__validation_path": "b.jsonl"}, {"data__streaming": True}):
        (problem,) = find(**EXAMPLES, **other, data__validation_share=0.1)
        assert problem.startswith("data.validation_share has no effect without rows of path"), (
            problem
        )
    for user in ("validation__enable", "evaluation__enable"):
        (problem,) = find(**EXAMPLES, **{user: True}, data__validation_share=0.0)
        assert problem.startswith(f"{user.replace('__', '.')} = true needs rows that are held out")
    elsewhere = {"evaluation__enable": True, "evaluation__path": "test.jsonl"}
    assert find(**EXAMPLES, **elsewhere, data__validation_share=0.0) == []


def test_epochs_of_a_stream_are_unknown() -> None:
    assert find(training__epochs=1.5) == []
    (problem,) = find(**EXAMPLES, data__streaming=True, training__epochs=1.5)
    assert problem.startswith("training.epochs = 1.5 needs data whose end is known")


def test_a_folder_that_is_named_like_a_dataset_of_the_hub_is_a_folder(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find(**EXAMPLES | {"data__path": "a/b"}, data__split="test") == []
    (problem,) = find(**EXAMPLES | {"data__path": "a/b"}, data__subset="test")
    assert problem.startswith("data.subset has no effect without a dataset of the hub in path.")


def test_all_problems_are_listed() -> None:
    problems = find(training__steps=-1, comm__timeout_seconds=0, data__dataset="text")
    assert [problem.split()[0] for problem in problems] == [
        "training.steps",
        "comm.timeout_seconds",
        "data.dataset",
    ]


@pytest.mark.parametrize(
    ("key", "bad"),
    [("optimizer.freeze", "a,,b"), ("optimizer.freeze", ","), ("optimizer.lr_multipliers", "a*")],
)
def test_patterns_are_checked(key: str, bad: str) -> None:
    (problem,) = find(**{key.replace(".", "__"): bad})
    assert problem.startswith(f"{key} = {bad!r}")


LORA = {"lora__rank": 8, "checkpoint__initial_load_path": "model", "model__flavor": ""}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**LORA}, []),
        ({**LORA, "lora__alpha": 3.0, "lora__dropout": 0.1, "lora__targets": "q_proj"}, []),
        (
            {"lora__rank": 8},
            ["adapters of a pretrained model, and there is none. Set model.path"],
        ),
        (
            {
                "evaluation__path": "rows.csv",
                "evaluation__enable": True,
                "evaluation__split": "train",
            },
            [],
        ),
        (
            {**LORA, "moe__expert_bias_update_rate": 0.1},
            ["moe.expert_bias_update_rate = 0.1 changes the model, which lora.rank freezes"],
        ),
        ({**LORA, "lora__targets": "a,,b"}, ["nothing between two commas"]),
        ({"training__objective": "dpo", "dpo__beta": 0.3}, []),
        (
            {"training__objective": "dpo", "dpo__reference": "adapters_off"},
            ["needs adapters, but lora.rank is 0"],
        ),
        ({**LORA, "training__objective": "dpo", "dpo__reference": "adapters_off"}, []),
        ({**LORA, "training__objective": "dpo", "dpo__reference": "cached"}, []),
    ],
)
def test_settings_of_fine_tuning_that_contradict_each_other(
    values: dict[str, Any], words: list[str]
) -> None:
    problems = find(**values)
    assert len(problems) == len(words)
    for problem, expected in zip(problems, words, strict=True):
        assert expected in problem
