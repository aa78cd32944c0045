"""Fine-tuning data in a real trainer: packing changes only the speed, and the order does not depend
on the mesh.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from files import read_json
from transformers import AutoTokenizer

from tests.functional.conftest import path_of, values_of, weekly
from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees
from titanlite.data.tokenizer import load_tokenizer


@pytest.fixture
def train(run_ranks, checked):
    """`train(degrees, folder, *overrides)`: 4 steps, saved after the second; per rank the token
    rows of each step.
    """

    def run(degrees, folder, *overrides):
        job = checked(
            degrees,
            *overrides,
            f"--job.dump_folder={folder}",
            "--training.steps=4",
            "--checkpoint.interval=2",
        )

        def rank_main():
            seen = []
            trainer = assemble(job)
            step = trainer.parts.stepper.train_step

            def watch(micro_batches):
                seen.append([row for batch in micro_batches for row in batch.tokens.tolist()])
                return step(micro_batches)

            trainer.parts.stepper.train_step = watch
            trainer.train()
            return seen

        return run_ranks(degrees.world_size, rank_main)

    return run


def losses(folder, name="loss/train"):
    return list(values_of(folder, name).values())


def global_batches(ranks):
    return [sorted(row for rank in ranks for row in rank[step]) for step in range(len(ranks[0]))]


@pytest.mark.parametrize("sources", [True, weekly(False)])
def test_resumed_on_another_world_size_the_stream_is_the_same(train, examples, tmp_path, sources):
    if sources:
        path = path_of(examples)
        lines = Path(path).read_text().splitlines(keepends=True)
        (tmp_path / "more.jsonl").write_text(
            "".join(line.replace("what", "is it not") for line in lines[:30])
        )
        examples = [
            *examples,
            "--data.path=",
            f"--data.sources.chats.path={path}",
            "--data.sources.chats.weight=2",
            f"--data.sources.more.path={tmp_path}/more.jsonl",
            "--data.sources.more.weight=3",
            "--data.sources.more.streaming=true",
            f"--data.sources.more.validation_path={tmp_path}/more.jsonl",
            "--data.streaming_block_rows=8",
            "--validation.enable=true",
            "--validation.freq=4",
        ]
    whole = train(Degrees(dp_shard=2, ep=2), tmp_path / "whole", *examples)
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "resumed/checkpoint/step-2")
    resumed = train(Degrees(), tmp_path / "resumed", *examples)
    assert global_batches(resumed) == global_batches(whole)[2:]
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole")[2:], rel=1e-4)
    if sources:
        names = [f"loss/validation{name}" for name in ("", "/chats", "/more")]
        found = [
            [losses(tmp_path / folder, name)[-1] for name in names]
            for folder in ("whole", "resumed")
        ]
        of_all, of_chats, of_more = found[0]
        assert found[1] == pytest.approx(np.array(found[0]), rel=1e-4)
        assert of_chats != pytest.approx(of_more, rel=1e-3)
        assert min(of_chats, of_more) < of_all < max(of_chats, of_more)
    saved = AutoTokenizer.from_pretrained(tmp_path / "resumed/checkpoint/step-4")
    assert saved.chat_template == load_tokenizer(examples[2].partition("=")[2]).chat_template
    generation = read_json(tmp_path / "resumed/checkpoint/step-4/generation_config.json")
    end_of_turn = saved.convert_tokens_to_ids("<|im_end|>")
    eos = generation["eos_token_id"]
    # plain transformers stops where the training did
    assert eos[-1] == end_of_turn and eos.count(end_of_turn) == 1
