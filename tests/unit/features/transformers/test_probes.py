"""What is found out about classes that mix documents, see later tokens, or raise."""

import re
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_transformers import ALL_MODELS, TEXT_SIZES
from transformers.modeling_outputs import CausalLMOutput

from titanlite.base.errors import ConfigError
from titanlite.config.schema import DataSection, JobConfig, MoESection, TrainingSection
from titanlite.features.generate.generate import generate
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.probes import check_documents_per_row
from titanlite.models.families.config_json import transformers_config

CPU = torch.device("cpu")
_MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
_LAYERS = ["linear_attention", "full_attention"]
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 6])


def build(config, cls=None):
    """A model in evaluation mode whose documents would show in each other, if they saw each
    other.
    """
    found = transformers_config(config.to_dict(), "test")
    cls = cls or getattr(transformers, found.architecture)
    model = TransformersModel(cls(config), found, {}).eval()
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.data.normal_(std=0.3, generator=generator)
    return model


def test_packages_with_kernels_are_named_on_gpus(monkeypatch, caplog):
    for package in ("causal_conv1d", "mamba_ssm"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    model = build(transformers.MambaConfig(**_MAMBA))
    model.configure("auto", MoESection(), 63, CPU)
    assert not caplog.records
    model.configure("auto", MoESection(), 64, torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "mamba_ssm", transformers)
    model.configure("auto", MoESection(), 65, torch.device("cuda"))
    build(transformers.LlamaConfig(**TEXT_SIZES)).configure(
        "auto", MoESection(), 64, torch.device("cuda")
    )
    needed = re.findall("needs (.*?), which", caplog.text)
    assert needed == ["causal_conv1d and mamba_ssm", "causal_conv1d"]


def tokens_and_labels():
    return torch.randint(3, 60, (2, 1, 20)).unbind()


@torch.no_grad()
def alone(model, tokens, *lengths):
    """Logits of the class's own forward of each document, without positions."""
    parts = tokens.split(list(lengths), dim=1)
    return torch.cat(
        [model.transformers_model(input_ids=part, use_cache=False).logits for part in parts], dim=1
    )


class Recurrent(transformers.LlamaForCausalLM):
    """A class whose state goes on into the next document unless it is told where that begins."""

    def forward(self, input_ids, seq_idx=None, **kwargs):
        hidden = self.model.embed_tokens(input_ids)
        parts = [hidden]
        if seq_idx is not None:
            assert input_ids.shape[0] == 1, "rows are joined"
            parts = hidden.split(seq_idx.unique_consecutive(return_counts=True)[1].tolist(), dim=1)
        states = torch.cat([part.cumsum(dim=1) for part in parts], dim=1)
        return CausalLMOutput(logits=self.lm_head(states))


@torch.no_grad()
def test_a_class_is_told_the_boundaries_that_it_needs():
    model = build(transformers.LlamaConfig(**TEXT_SIZES), Recurrent)
    tokens = torch.cat([tokens_and_labels()[0], tokens_and_labels()[1]])
    model(tokens, None, None, DOCUMENTS.expand(2, -1))  # finds the facts
    assert model.find_facts(CPU).takes_boundaries
    logits = model(tokens, None, None, DOCUMENTS.expand(2, -1))
    for row, expected in enumerate(tokens.split(1)):
        torch.testing.assert_close(logits[row : row + 1], alone(model, expected, 5, 9, 6))


def test_a_class_that_sees_later_tokens_is_refused():
    model = build(transformers.BertConfig(**TEXT_SIZES))
    message = f"{model.config.architecture} of transformers is not causal: .* Use another model"
    tokens, labels = tokens_and_labels()
    with pytest.raises(ConfigError, match=message):
        model(tokens, labels)
    with pytest.raises(ConfigError, match=message):
        generate(model, [[5, 6]], max_new_tokens=2, device=CPU)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(**_MAMBA),
        transformers.MiniMaxConfig(**TEXT_SIZES, num_local_experts=2, layer_types=_LAYERS),
    ],
)
def test_a_class_that_mixes_documents_takes_rows_of_one(config):
    model = build(config)
    tokens, labels = tokens_and_labels()
    one = torch.tensor([[0] * 14 + [-1] * 6])
    with torch.no_grad():
        logits = model(tokens, document_ids_BS=one)[:, :14]
        loss = model(tokens, labels.where(one >= 0, -100), document_ids_BS=one).cross_entropy
    expected = alone(model, tokens[:, :14], 14)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # float32
    wanted = torch.nn.functional.cross_entropy(expected[0], labels[0, :14], reduction="sum")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_what_a_forward_raises_is_the_reason(monkeypatch):
    model = build(ALL_MODELS["llama"]())
    plain = model.transformers_model.forward

    def forward(*args, position_ids=None, **kwargs):
        if position_ids is not None:
            raise IndexError("index 12 is out of bounds")
        return plain(*args, **kwargs)

    monkeypatch.setattr(model.transformers_model, "forward", forward)
    (problem,) = check_documents_per_row(JobConfig(), model, CPU)
    assert "mixes documents" in problem and "IndexError: index 12 is out of bounds" in problem
    assert not model.can_cache(CPU)
    assert len(generate(model, [[5, 6, 7], [8]], max_new_tokens=3, device=CPU)) == 2


def test_rows_are_refused_before_the_first_step():
    mixes, packs = build(transformers.MambaConfig(**_MAMBA)), build(ALL_MODELS["llama"]())
    job = JobConfig(data=DataSection(dataset="text"))
    assert check_documents_per_row(job, packs, CPU) == []
    (problem,) = check_documents_per_row(job, mixes, CPU)
    assert re.search(r"mixes documents .* Set data\.packing = false", problem)
    unpacked = replace(job, data=replace(job.data, packing=False))
    assert check_documents_per_row(unpacked, mixes, CPU) == []
    pairs = JobConfig(data=DataSection(packing=False), training=TrainingSection(objective="dpo"))
    (problem,) = check_documents_per_row(pairs, mixes, CPU)
    assert 'training.objective = "dpo" puts both sides of a pair into one' in problem


def test_logits_that_are_masked_in_place_are_not_the_heads(monkeypatch):
    """As Chameleon does with image tokens: loss and gradients are those of the masked logits."""
    model = build(ALL_MODELS["llama"]())
    forward = model.transformers_model.forward

    def masked(*args, **options):
        found = forward(*args, **options)
        found.logits[:, :, 5:9] = -1e4
        return found

    monkeypatch.setattr(model.transformers_model, "forward", masked)
    tokens, labels = tokens_and_labels()
    loss = model(tokens, labels, None, DOCUMENTS).cross_entropy
    logits = alone(model, tokens, 5, 9, 6)[0]
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum").item()
    )
