"""The commands on models that transformers implements: export, inspect, generate."""

import pytest
import torch
from sweep_training import their_continuation
from tiny_transformers import save_tiny

from titanlite.features.generate.generate import generate
from titanlite.features.tools.models import load_model
from titanlite.models.families import any_model_config_from_hf

PROMPTS = [[20, 31, 17, 90, 44, 8, 77], [55, 41, 19], [23], [14, 15, 92, 65, 35]]
NEW_TOKENS = 6
CPU = torch.device("cpu")


def greedy(reference):
    """Return transformers' continuation of each prompt alone."""
    return [their_continuation(reference, prompt, use_cache=True) for prompt in PROMPTS]


@pytest.mark.slow
def test_generates_the_same_when_sharded(run_ranks, tmp_path):
    """The mesh is FSDP2, with EP2 for models with experts; prompts are divided unevenly, and texts
    end at different tokens.
    """
    names = ["gemma3_text", "phi", "gpt_oss", "deepseek_v3"]
    references = {name: save_tiny(name, tmp_path / name) for name in names}
    texts = {name: greedy(reference) for name, reference in references.items()}
    ends = {name: [text[1][3]] for name, text in texts.items()}

    def rank_main():
        seen = {}
        for name in names:
            folder = tmp_path / name
            ep = 1 if name in ("gemma3_text", "phi") else 2
            config = any_model_config_from_hf(folder, "test")
            model, dims = load_model(folder, config, "float32", CPU, ep=ep)
            found = generate(
                model,
                PROMPTS[:3],
                max_new_tokens=NEW_TOKENS,
                device=CPU,
                dims=dims,
                batch_size=1,
                eos_token_ids=ends[name],
            )
            seen[name] = (model.can_cache(CPU), [continuation.tokens for continuation in found])
        return seen

    for seen in run_ranks(2, rank_main):
        for name, (cached, found) in seen.items():
            cut = [
                text[: text.index(end)] if end in text else text
                for text in texts[name][:3]
                for end in ends[name]
            ]
            assert (cached, found) == (True, cut), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_with_a_state_generates_by_full_forwards_and_says_so(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=4
    )
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(3.0)  # otherwise it repeats the last token
    reference.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, any_model_config_from_hf(tmp_path, "test"), "float32", CPU)
    said = []
    monkeypatch.setattr(
        "titanlite.features.generate.generate.logger.info",
        lambda text, *values: said.append(text % values),
    )
    found = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, device=CPU)
    assert [continuation.tokens for continuation in found] == greedy(reference)
    assert said == [
        "generate: MambaForCausalLM cannot cache keys and values: every token costs a full forward"
    ]
