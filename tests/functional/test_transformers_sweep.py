"""The sweep over transformers' classes: its most used families on several ranks, and a sample of
all.
"""

import re
import sys

import pytest
import sweep_training
import sweep_transformers

from tests.functional.conftest import MESHES, weekly

DISTINCT = ["gemma4", "gpt_oss", "deepseek_v4", "nemotron_h"]
# Each of these families has layers like another family's.
OTHERS = [
    "mixtral",
    "qwen3_next",
    "qwen3_5_moe",
    "llama4_text",
    "gemma3",
    "kimi_k25",
    "granitemoehybrid",
    "minimax_m2",
]
OTHERS += ["llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_5", "gemma2"]
OTHERS += ["phi3", "deepseek_v3", "glm4_moe", "olmo3", "cohere2"]
# mesh and recomputation
ON_TWO = ("FSDP2", "none")
ON_FOUR = {
    "gemma3_text": ("FSDP4", "full"),
    "phi": ("HSDP2x2", "none"),
    "deepseek_v3": ("EP4", "full"),
    "glm4_moe": ("HSDP2x2xEP2", "none"),
}


@pytest.mark.parametrize(
    ("world_size", "families"),
    [
        (2, dict.fromkeys(DISTINCT, ON_TWO)),
        weekly(2, dict.fromkeys(OTHERS, ON_TWO)),
        (4, ON_FOUR),
    ],
)
@pytest.mark.slow
def test_families_train_on_several_ranks(run_ranks, tmp_path, world_size, families):
    """Losses of two steps to 1e-6, gradients to 1e-4; transformers reads the whole checkpoint, bit
    for bit.
    """
    with sweep_transformers.quiet():
        chosen = sweep_transformers.save_cases(families, tmp_path)

        def rank_main():
            seen = {}
            for name, case in chosen.items():
                mesh, recompute = families[name]
                found = sweep_training.our_steps(
                    case.config, case.saved, MESHES[mesh], recompute=recompute
                )
                text = sweep_training.save_and_compare(case, found, tmp_path / f"{name}-trained")
                found.model = found.plan = None
                seen[name] = text, found
            return seen

        ranks = run_ranks(world_size, rank_main, timeout_s=300)
        assert {name: text for name, (text, _) in ranks[0].items()} == dict.fromkeys(
            families, "equal"
        )
        for name, case in chosen.items():
            expected = sweep_training.their_steps(case, ranks[0][name][1].batch)
            assert [seen[name][1].difference(expected) for seen in ranks] == [""] * world_size, name


@pytest.mark.slow
@pytest.mark.full
def test_a_sample_of_all_classes(monkeypatch, capsys):
    """The sweep finds neither a traceback nor a difference in 30 classes, which are different in
    each version.
    """
    monkeypatch.setattr(sys, "argv", [sweep_transformers.__file__, "--sample", "30"])
    code, said = sweep_transformers.main(), capsys.readouterr().out
    assert code == 0, said
    found = re.search(r"reads: (\d+)", said)
    assert found and 24 <= int(found[1]) <= 30, said
