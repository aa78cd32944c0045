"""What is found out about classes that mix documents, see later tokens, or raise."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_transformers import ALL_MODELS

from titanlite.base.errors import ConfigError
from titanlite.base.log import warn_once
from titanlite.config.schema import DataSection, JobConfig, MoESection, TrainingSection
from titanlite.features.generate.generate import generate
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.packing import boundaries
from titanlite.features.transformers.probes import check_documents_per_row, find_missing_kernels
from titanlite.models.families.config_json import transformers_config

CPU = torch.device("cpu")
_ENCODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
_MAMBA: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
_MINIMAX: dict[str, Any] = (
    _ENCODER
    | {"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 2}
    | {"layer_types": ["linear_attention", "full_attention"]}
)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 6])


def build(config: Any) -> TransformersModel:
    """A model in evaluation mode whose documents would show in each other, if they saw each other."""
    found = transformers_config(config.to_dict(), "test")
    model = TransformersModel(getattr(transformers, found.architecture)(config), found, {}).eval()
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.data.normal_(std=0.3, generator=generator)
    return model


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = torch.randint(3, 60, (2, 1, 20), generator=torch.Generator().manual_seed(0))
    return tokens, labels


@torch.no_grad()
def alone(model: TransformersModel, tokens: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Logits of the class's own forward of each document, without positions."""
    parts = tokens.split(list(lengths), dim=1)
    return torch.cat([model.transformers_model(input_ids=part, use_cache=False).logits for part in parts], dim=1)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra"])
def test_a_class_that_sees_later_tokens_is_refused(name: str) -> None:
    model = build(getattr(transformers, f"{name}Config")(**_ENCODER))
    message = f"{model.config.architecture} of transformers is not causal: .* Use another one"
    tokens, labels = tokens_and_labels()
    with pytest.raises(ConfigError, match=message):
        model(tokens, labels)
    with pytest.raises(ConfigError, match=message):
        generate(model, [[5, 6]], max_new_tokens=2, device=CPU)


@pytest.mark.parametrize("config", [transformers.MambaConfig(**_MAMBA), transformers.MiniMaxConfig(**_MINIMAX)])
def test_a_class_that_mixes_documents_takes_rows_of_one(config: Any) -> None:
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
    for documents in (DOCUMENTS, one.flip(1)):  # padding before a document is seen, too
        with pytest.raises(ConfigError, match=r"mixes documents that share a row: .* set data\.packing = false"):
            model(tokens, labels, document_ids_BS=documents)


def test_boundaries_of_rows_with_padding() -> None:
    ids, told = boundaries(torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]]))
    assert ids.tolist() == [[0, 0, 1, 2, 3, 3, 3, 3]]
    assert told["cu_seq_lens_q"].tolist() == [0, 2, 3, 4, 8]
    assert (told["max_length_k"], told["seq_idx"].dtype) == (4, torch.int32)


def test_a_class_that_takes_boundaries_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the kernels of flash-linear-attention, which are not installed here: each document by itself."""
    model = build(transformers.MambaConfig(**_MAMBA))
    inner = model.transformers_model
    plain = inner.forward

    def forward(input_ids: torch.Tensor, cu_seq_lens_q: torch.Tensor | None = None, **kwargs: Any) -> Any:
        for unused in ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"):
            kwargs.pop(unused, None)
        if cu_seq_lens_q is None:
            return plain(input_ids=input_ids, **kwargs)
        parts = input_ids.split(cu_seq_lens_q.diff().tolist(), dim=1)
        found = [plain(input_ids=part, **kwargs) for part in parts]
        found[0].logits = torch.cat([part.logits for part in found], dim=1)
        return found[0]

    tokens, labels = tokens_and_labels()
    expected = torch.cat([alone(model, tokens, 5, 9, 6), alone(model, tokens, 20)])
    monkeypatch.setattr(inner, "forward", forward)
    monkeypatch.setattr(model, "_takes_more", True)
    monkeypatch.setattr(model, "is_plain_head", False)  # the logits are put together, not the losses
    rows, ids = tokens.repeat(2, 1), torch.cat([DOCUMENTS, torch.zeros_like(DOCUMENTS)])
    with torch.no_grad():
        logits = model(rows, document_ids_BS=ids)
        loss = model(rows, labels.repeat(2, 1), document_ids_BS=ids, reduction="none").cross_entropy
    assert model.find_facts(CPU).takes_boundaries
    assert (logits.shape, loss.shape) == ((2, 20, 64), (2, 20))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # float32


def test_what_a_forward_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(ALL_MODELS["llama"]())
    plain = model.transformers_model.forward

    def forward(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is not None:
            raise IndexError("index 12 is out of bounds")
        return plain(*args, **kwargs)

    monkeypatch.setattr(model.transformers_model, "forward", forward)
    tokens, labels = tokens_and_labels()
    with pytest.raises(ConfigError, match=r"mixes documents .*IndexError: index 12 is out of bounds"):
        model(tokens, labels, document_ids_BS=DOCUMENTS)
    assert not model.can_cache(CPU)
    assert len(generate(model, [[5, 6, 7], [8]], max_new_tokens=3, device=CPU)) == 2


def test_inference_mode_around_the_first_forward_changes_nothing() -> None:
    texts = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        model = build(ALL_MODELS["llama"]())
        with mode:
            texts.append(generate(model, [[5, 6, 7], [8]], max_new_tokens=3, device=CPU))
        assert model.find_facts(CPU).has_plain_head and model.can_cache(CPU)
    assert texts[0] == texts[1]


def test_a_class_that_needs_more_than_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(ALL_MODELS["llama"]())

    def forward(**kwargs: Any) -> Any:
        raise ValueError("You must give pixel_values")

    monkeypatch.setattr(model.transformers_model, "forward", forward)
    with pytest.raises(ConfigError, match="does not run on text alone: ValueError: You must give pixel_values"):
        model(*tokens_and_labels())


def test_rows_are_refused_before_the_first_step() -> None:
    mixes, packs = build(transformers.MambaConfig(**_MAMBA)), build(ALL_MODELS["llama"]())
    job = JobConfig(data=DataSection(dataset="text"))
    check_documents_per_row(job, packs, CPU)
    with pytest.raises(ConfigError, match=r"mixes documents .*data\.packing = true .* Set data\.packing = false"):
        check_documents_per_row(job, mixes, CPU)
    check_documents_per_row(replace(job, data=replace(job.data, packing=False)), mixes, CPU)
    pairs = JobConfig(data=DataSection(packing=False), training=TrainingSection(objective="dpo"))
    with pytest.raises(ConfigError, match=r'training\.objective = "dpo" puts both sides of a pair into one'):
        check_documents_per_row(pairs, mixes, CPU)


def test_what_is_no_next_token_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of another shape than the tokens."""
    model = build(ALL_MODELS["qwen3"]())
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda *args, **options: compute(*args, **options)[:, :1])
    with pytest.raises(ConfigError, match="does not run on text alone: it has logits"):
        model.find_facts(CPU)


def test_logits_that_are_masked_in_place_are_not_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Chameleon does with image tokens: loss and gradients are those of the masked logits."""
    model = build(ALL_MODELS["llama"]())
    forward = model.transformers_model.forward

    def masked(*args: Any, **options: Any) -> Any:
        found = forward(*args, **options)
        found.logits[:, :, 5:9] = -1e4
        return found

    monkeypatch.setattr(model.transformers_model, "forward", masked)
    tokens, labels = tokens_and_labels()
    loss = model(tokens, labels, None, DOCUMENTS).cross_entropy
    logits = alone(model, tokens, 5, 9, 6)[0]
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum").item())


def test_what_a_class_says_of_its_inputs_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.ReformerConfig(
        **{name: _ENCODER[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")},
        attention_head_size=8,
        attn_layers=["local"],
        is_decoder=True,
        feed_forward_size=16,
        axial_pos_shape=[4, 6],
        axial_pos_embds_dim=[8, 8],
        max_position_embeddings=24,
    )
    model = build(config).train()
    tokens, labels = tokens_and_labels()
    with pytest.raises(
        ConfigError, match=r"refuses a forward of \[1, 20\] tokens: If training, .* Set training.seq_len"
    ):
        model(tokens, labels, None, torch.zeros_like(tokens))
    monkeypatch.setattr(model.transformers_model, "forward", lambda state, **inputs: None)  # PI0's, of a robot
    with pytest.raises(ConfigError, match=r"refuses a forward of .* missing 1 required positional argument: 'state'"):
        model(tokens, labels, pixel_values=tokens)


def test_xlnet_is_causal_if_its_configuration_says_so() -> None:
    config = transformers.XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32, d_head=8)
    with pytest.raises(ConfigError, match="is not causal: "):
        build(config).find_facts(CPU)
    config.attn_type = "uni"
    assert build(config).find_facts(CPU).is_causal


def blip2(language_model: str) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {
        "opt": sizes | {"word_embed_proj_dim": 16, "ffn_dim": 16},
        "t5": {"d_model": 16, "d_ff": 16, "num_layers": 1},
    }
    return transformers.Blip2Config(
        vision_config=sizes | {"image_size": 28},
        qformer_config=sizes | {"vocab_size": 64},
        text_config=text[language_model] | {"model_type": language_model, "vocab_size": 64},
    )


def bart_decoder() -> Any:
    return transformers.BartConfig(architectures=["BartForCausalLM"], is_decoder=True, is_encoder_decoder=False)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.T5Config(), "T5ForConditionalGeneration"),
        (transformers.MBartConfig(architectures=["MBartForConditionalGeneration"]), "MBartForConditionalGeneration"),
        (bart_decoder(), "BartForCausalLM"),
        (blip2("t5"), "Blip2ForConditionalGeneration"),
    ],
)
def test_an_encoder_decoder_is_refused(config: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"test: {name} belongs to an encoder-decoder, .* Use a model that has a dec"):
        transformers_config(config.to_dict(), "test")


def test_a_class_for_language_models_of_both_kinds_is_what_its_configuration_says() -> None:
    assert transformers_config(blip2("opt").to_dict(), "test").architecture == "Blip2ForConditionalGeneration"


def test_embeddings_that_share_their_weight_are_no_layer() -> None:
    """BERT's must not be split, and the head has their weight: with FSDP the two would part."""
    model = build(transformers.BertConfig(**_ENCODER, is_decoder=True))
    assert {type(layer).__name__ for layer in model.decoder_layers()} == {"BertLayer"}


_LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_FAST = [
    (transformers.Qwen3NextConfig(**_ENCODER, **_LINEAR, num_experts=2), ["causal_conv1d", "fla"]),
    (transformers.MambaConfig(**_MAMBA), ["causal_conv1d", "mamba_ssm"]),
    (transformers.Lfm2Config(**_ENCODER, layer_types=["conv", "full_attention"]), ["causal_conv1d"]),
    (transformers.Lfm2Config(**_ENCODER, layer_types=["full_attention"] * 2), []),  # no layer has such kernels
    (transformers.MixtralConfig(**_ENCODER), []),
]


@pytest.mark.parametrize(("config", "packages"), _FAST, ids=lambda value: getattr(value, "model_type", ""))
def test_kernels_of_packages_that_are_not_there_are_one_line(config, packages, monkeypatch, caplog) -> None:
    model = build(config)
    assert find_missing_kernels(model.transformers_model) == packages
    for device in ("cpu", "cuda"):
        caplog.clear()
        warn_once.cache_clear()
        with caplog.at_level("INFO"):
            model.configure("sdpa", MoESection(), 1024, torch.device(device))
        lines = [record for record in caplog.records if "fast path" in record.getMessage()]
        assert [record.levelname for record in lines] == [{"cpu": "INFO", "cuda": "WARNING"}[device]] * bool(packages)
        for record in lines:
            text, names = record.getMessage(), " and ".join(packages)
            assert f"{model.config.architecture} on GPUs needs {names}, which cannot be imported" in text
            assert ("flash-linear-attention" in text) == ("fla" in packages)
    for package in packages:  # as transformers has imported them
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert find_missing_kernels(model.transformers_model) == []
