"""What is found out about classes that mix documents, see later tokens, count positions otherwise, or raise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny_transformers import ALL_MODELS

from titanlite.base.errors import ConfigError
from titanlite.config.schema import DataSection, JobConfig, TrainingSection
from titanlite.features.generate.generate import generate
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.packing import boundaries
from titanlite.features.transformers.probes import check_documents_per_row
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
    message = f"{model.config.architecture} of transformers is not causal: .* Set is_decoder = true in its config.json"
    tokens, labels = tokens_and_labels()
    with pytest.raises(ConfigError, match=message):
        model(tokens, labels)
    with pytest.raises(ConfigError, match=message):
        generate(model, [[5, 6]], max_new_tokens=2, device=CPU)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Camembert", "XLMRoberta"])
def test_documents_have_the_positions_that_the_class_counts(name: str) -> None:
    """RoBERTa and its kin begin after the padding's id."""
    model = build(getattr(transformers, f"{name}Config")(**_ENCODER, is_decoder=True))
    tokens, _ = tokens_and_labels()
    with torch.no_grad():
        packed = model(tokens, document_ids_BS=DOCUMENTS)
    torch.testing.assert_close(packed, alone(model, tokens, 5, 9, 6), rtol=1e-4, atol=1e-5)  # float32
    assert model.find_facts(CPU).first_position == (0 if name == "Bert" else 2)
    assert model.can_cache(CPU)


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


def test_a_class_that_mixes_up_positions_of_a_longer_row_is_refused() -> None:
    sizes: dict[str, Any] = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {f"num_{part}_{n}": 2 for part in ("encoder", "decoder") for n in ("layers", "attention_heads")}
    config = transformers.ProphetNetConfig(vocab_size=64, hidden_size=16, **sizes, is_encoder_decoder=False)
    config.is_decoder = True
    with pytest.raises(ConfigError, match="logits of ProphetNetForCausalLM of transformers depend on the length"):
        build(config).find_facts(CPU)


@pytest.mark.parametrize("attribute", ["logits", "rows"])
def test_what_is_no_next_token_model_is_refused(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of another shape, as of an encoder and decoder, or ones that depend on how long the row is."""
    model = build(ALL_MODELS["qwen3"]())
    compute = model.compute_logits

    def changed(tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        logits = compute(tokens, *args, **options)
        return logits[:, :1] if attribute == "logits" else logits * tokens.shape[1]

    monkeypatch.setattr(model, "compute_logits", changed)
    what = "does not run on text alone: it has logits" if attribute == "logits" else "depend on the length of the row"
    with pytest.raises(ConfigError, match=what):
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
    with pytest.raises(ConfigError, match=r'is not causal: .* Set attn_type = "uni" in its config\.json'):
        build(config).find_facts(CPU)
    config.attn_type = "uni"
    assert not build(config).find_facts(CPU).why_mixed.startswith("its encoder")


def t5gemma2() -> TransformersModel:
    """Prompts into an encoder, with a mask and positions of its own, and completions out of a decoder."""
    text = {name: _ENCODER[name] for name in _ENCODER if name != "pad_token_id"}
    text |= {"num_key_value_heads": 1, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = {"text_config": text, "vision_config": vision | {"image_size": 28, "patch_size": 14}}
    ids = {"image_token_index": 62, "eoi_token_index": 63}
    return build(transformers.T5Gemma2Config(encoder=encoder | ids, decoder=text, **ids))


def t5() -> TransformersModel:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return build(transformers.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0))


def mbart() -> TransformersModel:
    """A decoder that first reads the last token of what it is to say; its folder names one of two classes."""
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "vocab_size": 64}
    return build(transformers.MBartConfig(**sizes, dropout=0.0, architectures=["MBartForConditionalGeneration"]))


@pytest.mark.parametrize("make", [t5gemma2, t5, mbart])
def test_an_encoder_decoder_learns_completions_of_prompts(make: Callable[[], TransformersModel]) -> None:
    """Rows with prompts of other lengths: losses, also per token, and gradients of the class's own `labels`."""
    model = make()
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    labels, ids = tokens.roll(-1, 1), torch.tensor([[0] * 11 + [-1], [0] * 8 + [-1] * 4])
    for row, (prompt, end) in enumerate([(3, 11), (6, 8)]):
        labels[row, : prompt - 1] = labels[row, end - 1 :] = -100
    losses = model(tokens, labels, None, ids, reduction="none").cross_entropy
    assert torch.equal(losses == 0, labels == -100)
    losses.sum().backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    inner = model.transformers_model
    summed = torch.zeros(())
    for row, (prompt, end) in enumerate([(3, 11), (6, 8)]):
        answer = tokens[row : row + 1, prompt:end]
        theirs = inner(input_ids=tokens[row : row + 1, :prompt], labels=answer, use_cache=False).loss
        torch.testing.assert_close(losses[row].sum(), theirs * answer.numel(), rtol=1e-5, atol=1e-5)  # float32
        summed = summed + theirs * answer.numel()
    summed.backward()
    for name, param in model.named_parameters():
        expected = torch.zeros(()) if param.grad is None else param.grad
        torch.testing.assert_close(found.get(name, torch.zeros(())), expected, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("language_model", ["opt", "t5"])
def test_a_class_for_language_models_of_both_kinds_is_what_its_configuration_says(language_model: str) -> None:
    """BLIP-2's forward has `decoder_input_ids` also for a language model without an encoder."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {
        "opt": sizes | {"word_embed_proj_dim": 16, "ffn_dim": 16},
        "t5": {"d_model": 16, "d_ff": 16, "num_layers": 1},
    }
    config = transformers.Blip2Config(
        vision_config=sizes | {"image_size": 28},
        qformer_config=sizes | {"vocab_size": 64},
        text_config=text[language_model] | {"model_type": language_model, "vocab_size": 64},
    )
    assert build(config).is_encoder_decoder == (language_model == "t5")


def test_an_encoder_decoder_wants_prompts_and_does_not_generate() -> None:
    model = t5gemma2()
    examples = DataSection(dataset="examples", packing=False)
    check_documents_per_row(JobConfig(data=examples), model, CPU)
    for data in (replace(examples, dataset="text"), replace(examples, train_on="all")):
        with pytest.raises(ConfigError, match=r'is an encoder-decoder, .* Set data\.dataset = "examples" and data\.tr'):
            check_documents_per_row(JobConfig(data=data), model, CPU)
    with pytest.raises(ConfigError, match=r"its encoder reads one prompt for each row.* Set data\.packing = false"):
        check_documents_per_row(JobConfig(data=replace(examples, packing=True)), model, CPU)
    assert not model.can_cache(CPU)
    with pytest.raises(ConfigError, match=r"T5Gemma2ForConditionalGeneration .* generates nothing\. Save it"):
        generate(model, [[5, 6]], max_new_tokens=2, device=CPU)


def test_embeddings_that_share_their_weight_are_no_layer() -> None:
    """BERT's must not be split, and the head has their weight: with FSDP the two would part."""
    model = build(transformers.BertConfig(**_ENCODER, is_decoder=True))
    assert {type(layer).__name__ for layer in model.decoder_layers()} == {"BertLayer"}
