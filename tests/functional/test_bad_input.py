"""Bad input, partly through real processes: one clear error, exit code 2, within seconds, and every
rank ends.
"""

import pytest

from titanlite.base.errors import NOTICE_FOLDER
from titanlite.rank import main

# The check takes a fraction of a second; the rest is for a machine that is busy with other work.
PREFLIGHT_TIMEOUT_S = 20


def assert_one_error(done, *words):
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("titanlite: error: ") == 1, done.stderr
    assert done.stderr.startswith("titanlite: error: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert done.stderr.count(word) == 1, done.stderr


def test_run_train_refuses_before_it_starts_ranks(run_process, config_file):
    arguments = ["--config", str(config_file), "--parallelism.expert_parallel_degree=3"]
    done = run_process(
        ["./run_train.sh", *arguments],
        PREFLIGHT_TIMEOUT_S,
        env={"NGPU": "4", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert_one_error(done, "ep (3) does not divide")


def assert_one_error_of_all_ranks(launched, message):
    assert launched.end() == 2, launched.report()
    assert launched.output.count("titanlite: error: ") == 1, launched.output
    assert launched.output.count(f"titanlite: error: {message}") == 1, launched.output
    assert "Traceback" not in launched.output


def test_ranks_refuse_a_wrong_configuration_with_one_voice(launch):
    message = (
        "configuration: parallelism: dp_replicate (1) * tp (4) = 4 does not divide the world size "
        "(2)."
    )
    assert_one_error_of_all_ranks(launch("run", "--parallelism.tensor_parallel_degree=4"), message)


def test_ranks_refuse_a_vocabulary_that_the_model_lacks_with_one_voice(launch, tmp_path):
    message = (
        "data: the tokenizer has 310 tokens, but the model's vocab_size is 300. Use the "
        "model's own tokenizer, or set model.overrides.vocab_size = 310"
    )
    assert_one_error_of_all_ranks(launch("run", "--model.overrides.vocab_size=300"), message)
    assert not (tmp_path / "run").exists(), "nothing is left of a run that never began"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["--data.tokenizer_path=/nowhere"],
            "data: tokenizer_path /nowhere: /nowhere does not exist.",
        ),
        (
            ["--training.seq_len=11000", "--model.overrides.max_position_embeddings=11000"],
            "10707 tokens give 0 sequence(s) of training.seq_len (11000), but 1 is needed",
        ),
        (["--job.dump_folder={file}/run"], "Not a directory"),
    ],
    ids=["tokenizer", "too little text", "dump folder"],
)
def test_data_and_folders_are_the_same_titanlite_error_on_all_ranks(
    run_ranks, config_file, tmp_path, capfd, monkeypatch, overrides, words
):
    """Compare what 2 ranks print and return, without the 10 seconds of a launch."""
    file = tmp_path / "file"
    file.write_text("not a folder")
    argv = ["--config", str(config_file), f"--job.dump_folder={tmp_path / 'run'}"]
    argv += [override.format(file=file) for override in overrides]
    monkeypatch.setenv(NOTICE_FOLDER, str(tmp_path))  # as the launcher does
    # run_ranks ends with a barrier
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    codes = run_ranks(2, lambda: main(argv), timeout_s=60)
    output = "".join(capfd.readouterr())
    assert codes == [2, 2], output
    assert output.count("titanlite: error: ") == 1, output
    assert output.count(words) == 1, output
    assert "Traceback" not in output
