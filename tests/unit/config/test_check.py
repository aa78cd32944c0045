"""Range checks: what passes, what is refused and in which words."""

from typing import Any

import pytest

from titanlite.config import JobConfig
from titanlite.config.check import check_values
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
        assert (
            check_values(make_job(**{name: value}, activation_checkpoint__mode="selective")) == []
        )
    for value in bad:
        problems = check_values(make_job(**{name: value}))
        assert len(problems) == 1, value
        assert problems[0].startswith(f"{key} = {format_value(value)} is ")


def test_problem_says_what_is_allowed() -> None:
    assert check_values(make_job(optimizer__beta2=1.0)) == [
        "optimizer.beta2 = 1.0 is out of range. Set it to 0 or more and less than 1."
    ]
    assert check_values(make_job(activation_checkpoint__selective_ac_option="all")) == [
        "activation_checkpoint.selective_ac_option = \"all\" is not 'op' or a positive integer. "
        'Write "op", or for example "2" to recompute every second layer.'
    ]


def test_there_is_a_model() -> None:
    assert check_values(JobConfig()) == [
        "model.path and model.flavor are both empty, so there is no model. Set model.path to a "
        "folder or hub id, or model.name and model.flavor for a new model with random weights."
    ]
    assert check_values(make_job(model__flavor="", model__hf_assets_path="assets")) == []
    assert check_values(make_job(model__hf_assets_path="assets")) == [], (
        "the tokenizer of one, the sizes of the other"
    )


def test_text_dataset_needs_a_path() -> None:
    assert check_values(make_job(data__dataset="text")) == [
        'data.dataset = "text" needs data.path, which is empty. Set it to a text file or a folder.'
    ]
    assert check_values(make_job(data__dataset="text", data__path="corpus.txt")) == []


EXAMPLES = {"data__dataset": "examples", "data__path": "rows.jsonl"}


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        (
            {"activation_checkpoint__selective_ac_option": "3"},
            "activation_checkpoint.selective_ac_option",
        ),
        ({**EXAMPLES, "data__split": "test"}, "data.split"),
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
    (problem,) = check_values(make_job(**settings))
    assert problem.startswith(f"{ignored} = ") and problem.lower().endswith("leave it out.")


def test_settings_of_the_hub_and_of_streams_are_taken_there() -> None:
    hub = {**EXAMPLES, "data__path": "a/b@v1", "data__split": "test", "data__subset": "de"}
    assert (
        check_values(make_job(**hub, data__validation_path="a/b", data__validation_split="dev"))
        == []
    )
    assert (
        check_values(make_job(**EXAMPLES, data__streaming=True, data__streaming_block_rows=64))
        == []
    )


def test_rows_are_held_out_where_someone_wants_them() -> None:
    assert (
        check_values(make_job(data__validation_share=0.0))
        == check_values(make_job(data__validation_share=0.1))
        == []
    )
    for other in ({"data__validation_path": "b.jsonl"}, {"data__streaming": True}):
        (problem,) = check_values(make_job(**EXAMPLES, **other, data__validation_share=0.1))
        assert problem.startswith("data.validation_share = 0.1 has no effect on this data"), problem
    for user in ("validation__enable", "evaluation__enable"):
        (problem,) = check_values(make_job(**EXAMPLES, **{user: True}, data__validation_share=0.0))
        assert (
            problem.startswith("no rows are held out")
            and f"{user.replace('__', '.')} is on" in problem
        )
    elsewhere = {"evaluation__enable": True, "evaluation__path": "test.jsonl"}
    assert check_values(make_job(**EXAMPLES, **elsewhere, data__validation_share=0.0)) == []


def test_epochs_of_a_stream_are_unknown() -> None:
    assert check_values(make_job(training__epochs=1.5)) == []
    (problem,) = check_values(make_job(**EXAMPLES, data__streaming=True, training__epochs=1.5))
    assert problem.startswith("training.epochs needs data whose end is known")


def test_a_folder_that_is_named_like_a_dataset_of_the_hub_is_a_folder(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert check_values(make_job(**EXAMPLES | {"data__path": "a/b"}, data__split="test")) == []
    (problem,) = check_values(make_job(**EXAMPLES | {"data__path": "a/b"}, data__subset="test"))
    assert (
        problem
        == 'data.subset = "test" has no effect on this data (data.dataset = "examples"). Leave it '
        "out."
    )


def test_all_problems_are_listed() -> None:
    problems = check_values(
        make_job(training__steps=-1, comm__timeout_seconds=0, data__dataset="text")
    )
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
    (problem,) = check_values(make_job(**{key.replace(".", "__"): bad}))
    assert problem.startswith(f"{key} = {bad!r}")


LORA = {"lora__rank": 8, "checkpoint__initial_load_path": "model", "model__flavor": ""}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**LORA}, []),
        ({**LORA, "lora__alpha": 3.0, "lora__dropout": 0.1, "lora__targets": "q_proj"}, []),
        (
            {"lora__rank": 8},
            ["adapters of a pretrained model, and there is none. Set model.path to that model."],
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
            ["moe.expert_bias_update_rate = 0.1: with lora.rank = 8"],
        ),
        ({**LORA, "lora__targets": "a,,b"}, ["nothing between two commas"]),
        ({"training__objective": "dpo", "dpo__beta": 0.3}, []),
        (
            {"training__objective": "dpo", "dpo__reference": "adapters_off"},
            ["needs adapters, but lora.rank = 0"],
        ),
        ({**LORA, "training__objective": "dpo", "dpo__reference": "adapters_off"}, []),
        ({**LORA, "training__objective": "dpo", "dpo__reference": "cached"}, []),
    ],
)
def test_settings_of_fine_tuning_that_contradict_each_other(
    values: dict[str, Any], words: list[str]
) -> None:
    problems = check_values(make_job(**values))
    assert len(problems) == len(words)
    for problem, expected in zip(problems, words, strict=True):
        assert expected in problem
