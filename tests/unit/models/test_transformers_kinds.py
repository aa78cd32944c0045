"""Kinds of models of transformers that need care: rotary frequencies, widths of experts, sizes of
vocabularies.
"""

import pytest
import torch
import transformers
from tiny_transformers import ALL_MODELS

from tests.loading import load
from titanlite.base.errors import ConfigError
from titanlite.config import load_config
from titanlite.features.generate.generate import generate
from titanlite.preflight import check

LIMIT, LONGEST = 8, 48
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 1e4,
}
ROPES = {
    "phi3 longrope": ("phi3", {**LONGROPE, "original_max_position_embeddings": LIMIT}),
    "llama longrope": (
        "llama",
        {**LONGROPE, "original_max_position_embeddings": LIMIT, "factor": 6.0},
    ),
}


def make(folder, rope):
    name, table = ROPES[rope]
    config = ALL_MODELS[name]()
    values = {**config.to_dict(), "rope_parameters": table, "max_position_embeddings": LONGEST}
    if name == "phi3":
        values["original_max_position_embeddings"] = LIMIT
    theirs = transformers.AutoModelForCausalLM.from_config(type(config).from_dict(values))
    for param in theirs.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    theirs.save_pretrained(folder)
    ours = load(folder, "transformers")
    assert ours.config.rope_limit == LIMIT
    return ours


@pytest.mark.parametrize("rope", ROPES)
def test_a_prompt_does_not_depend_on_its_neighbours(tmp_path, rope):
    """Each text is that of its tokens alone, in whatever order and company they come."""
    model = make(tmp_path, rope)
    new, lengths = 6, (3, 20, 30)
    prompts = [torch.randint(3, 128, (n,)).tolist() for n in lengths]
    together = generate(
        model, prompts, max_new_tokens=new, device=torch.device("cpu"), batch_size=2
    )
    alone = []
    for prompt in reversed(prompts):
        fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        text = list(prompt)
        for _ in range(new):
            with torch.no_grad():
                text.append(
                    int(fresh(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
                )
        alone.insert(0, text[len(prompt) :])
    assert [continuation.tokens for continuation in together] == alone


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_follow_the_last_token_of_a_document(tmp_path, rope):
    """Padding chooses none: a short document in a long row has the logits that it has alone."""
    model = make(tmp_path, rope)
    tokens, ids = torch.full((1, 24), 5), torch.full((1, 24), -1)
    tokens[0, :6], ids[0, :6] = torch.arange(20, 26), 0
    with torch.no_grad():
        padded = model(tokens, None, torch.arange(24).unsqueeze(0), ids)[0, :6]
        alone = model(tokens[:, :6])[0]
        long = model(tokens)[0, :6]
    assert (padded - alone).norm() <= 1e-5 * alone.norm() < 1e-2 * (long - alone).norm()

    # Earlier tokens do not see the last one, only its position.
    positions = torch.arange(6).repeat(3, 1)
    positions[:, -1] = torch.tensor([5, LIMIT - 1, LIMIT])
    with torch.no_grad():
        short, same, other = (
            model(torch.arange(20, 26).view(1, -1), None, row.view(1, -1))[0, :5]
            for row in positions
        )
    assert torch.equal(short, same) and (other - short).norm() > 1e-3 * short.norm()


def test_training_beyond_the_original_length_is_refused(tmp_path):
    make(tmp_path / "model", "phi3 longrope")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run.toml").write_text("")
    base = [
        "--config",
        f"{tmp_path}/run.toml",
        f"--model.hf_assets_path={tmp_path}/model",
        "--data.dataset=examples",
        f"--data.path={tmp_path}/rows.jsonl",
        f"--data.tokenizer_path={tmp_path}/model",
    ]

    def run(*overrides):
        check(load_config([*base, *overrides]), 1)

    run(f"--training.seq_len={LIMIT}")
    message = (
        r"training.seq_len \(16\): beyond 8 tokens .* Set training.seq_len = 8; examples .* "
        r"data.packing = false"
    )
    for overrides in (("--data.packing=false",), ("--training.local_batch_size=1",)):
        with pytest.raises(ConfigError, match=message):
            run("--training.seq_len=16", "--training.local_batch_size=2", *overrides)
    run("--training.seq_len=16", "--data.packing=false", "--training.local_batch_size=1")
