"""A model of images and text that transformers implements, from chats with images to a checkpoint
that transformers loads.

`test_transformers_sweep.py` compares the training of text models with transformers' own.
"""

import json

import pytest
from files import read_lines
from tiny_transformers import save_tiny_llava

from tests.functional.conftest import MESHES, NO_PRESET
from titanlite.assemble import assemble


@pytest.mark.slow
def test_a_file_of_chats_with_images_trains(run_ranks, checked, tmp_path):
    """From images and a .jsonl file the run makes a model and processor that transformers loads;
    the loss falls.
    """
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    save_tiny_llava(tmp_path / "llava")
    chats = []
    for i, color in enumerate(["red", "blue"] * 4):
        Image.new("RGB", (9 + i, 12), color).save(tmp_path / f"{i}.png")
        content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "what is this"}]
        answer = {"role": "assistant", "content": color}
        chats.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    job = checked(
        MESHES["FSDP2"],
        *NO_PRESET,
        f"--checkpoint.initial_load_path={tmp_path / 'llava'}",
        "--model.implementation=transformers",
        "--moe.expert_bias_update_rate=none",
        "--data.dataset=images",
        f"--data.path={tmp_path / 'chats.jsonl'}",
        "--training.steps=12",
        "--training.global_batch_size=4",
        "--optimizer.lr=2e-2",
        "--lr_scheduler.warmup_steps=0",
    )
    run_ranks(2, lambda: assemble(job).train())
    points = read_lines(tmp_path / "run/metrics.jsonl")
    losses = [point["loss/train"] for point in points if "loss/train" in point]
    assert losses[-1] < 0.5 * losses[0]
    length = job.job.training.seq_len
    trained = {
        round(length * (1 - point["data/padding"]), 6)
        for point in points
        if "data/padding" in point
    }
    assert len(trained) == 1 and trained < set(range(1, length)), (
        "rows of equally many tokens, and padding"
    )
    folder = tmp_path / "run/checkpoint/step-12"
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "LlavaProcessor"
