import copy
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from files import read_json, read_table, write_json
from tokenizers.processors import TemplateProcessing

from titanlite.data import tokenizer as tokenizer_module
from titanlite.data import tokens as tokens_module
from titanlite.data.corpus import build_corpus
from titanlite.data.tokenizer import END_OF_TEXT, build_tokenizer
from titanlite.data.tokens import build_tokens


@pytest.fixture
def tokenizer(data):
    return build_tokenizer(data, build_corpus(data))


def _build(data, tokenizer):
    return build_tokens(data, build_corpus(data), tokenizer)


def test_every_document_is_followed_by_end_of_text(data, tokenizer):
    expected = []
    for _, text in build_corpus(data):
        expected += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    tokenized = _build(data, tokenizer)
    assert tokenized.tokens.tolist() == expected
    assert (tokenized.num_documents, tokenized.vocab_size, tokenized.eos_token_id) == (40, 300, 0)
    assert tokenized.tokens.dtype == np.uint16
    assert isinstance(tokenized.tokens, np.memmap)
    assert not tokenized.tokens.flags.writeable


@pytest.mark.parametrize("begin", ["<|begin|>", END_OF_TEXT])
def test_every_document_begins_with_what_the_tokenizer_puts_before_a_text(
    begin,
    data,
    tokenizer,
    monkeypatch,
):
    """Llama's begin-of-text token; where it is the end-of-text token too, the document before has
    left it.
    """
    monkeypatch.setattr(tokens_module, "_PIECE_CHARS", 50)  # documents of several pieces
    plain = _build(data, tokenizer).tokens.tolist()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": begin})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    found = _build(data, tokenizer).tokens.tolist()
    if begin == END_OF_TEXT:
        assert found == plain
        return
    expected = [tokenizer.bos_token_id]
    for token in plain:
        expected += [token, tokenizer.bos_token_id] if token == tokenizer.eos_token_id else [token]
    assert found == expected[:-1]


def test_text_that_spells_a_special_token_is_text(data, tokenizer, tmp_path):
    data.path = str(tmp_path / "a.txt")
    text = f"one{END_OF_TEXT}two"
    Path(data.path).write_text(text)
    ids = _build(data, tokenizer).tokens.tolist()
    assert [i for i, token in enumerate(ids) if token == tokenizer.eos_token_id] == [len(ids) - 1]
    assert tokenizer.decode(ids[:-1]) == text
    # the caller's tokenizer is left as it was
    assert tokenizer.encode(text).count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("case", read_table("rows")["separated"])
def test_separators_in_a_file(data, tokenizer, tmp_path, case):
    data.path, data.document_separator = str(tmp_path / "a.txt"), case["separator"]
    Path(data.path).write_bytes(case["text"].encode())
    tokenized = _build(data, tokenizer)
    plain = tokens_module.get_plain_encoder(tokens_module.serialize(tokenizer))
    ids = [[*plain.encode(text).ids, tokenizer.eos_token_id] for text in case["documents"]]
    assert tokenized.tokens.tolist() == [token for document in ids for token in document]
    assert tokenized.num_documents == len(case["documents"])
    spelled = case.get("spelled", 0)
    assert tokenized.spelled == ({END_OF_TEXT: spelled} if spelled else {})
    assert (END_OF_TEXT in tokenized.get_warning()) == bool(spelled)
    assert ("split at" in tokenized.describe()) == bool(tokenized.separators)


def test_the_end_token_of_the_tokenizer_separates_and_is_read(data, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    data.path = str(tmp_path / "a.txt")
    Path(data.path).write_text(f"<s>one</s>\n<s>two</s>\n{END_OF_TEXT}\nthree</s>")
    tokenized = _build(data, tokenizer)
    assert tokenizer.decode(tokenized.tokens.tolist()) == "<s>one</s><s>two</s>three</s>"
    assert np.count_nonzero(tokenized.tokens == tokenizer.eos_token_id) == 3
    assert np.count_nonzero(tokenized.tokens == tokenizer.bos_token_id) == 2


def test_large_vocabulary_gives_uint32(data, tokenizer):
    small = _build(data, tokenizer).tokens.tolist()
    tokenizer.add_tokens([f"<extra-{i}>" for i in range(2**16 - 300)])
    assert _build(data, tokenizer).tokens.dtype == np.uint16  # exactly 65536 still fit
    tokenizer.add_tokens(["<one-more>"])
    tokenized = _build(data, tokenizer)
    assert (tokenized.tokens.dtype, tokenized.vocab_size) == (np.uint32, 2**16 + 1)
    assert tokenized.tokens.tolist() == small


def test_key_follows_text_and_tokenizer(data, tokenizer, tmp_path):
    data.path = str(tmp_path / "a.txt")
    Path(data.path).write_text("aa bb")
    first = _build(data, tokenizer).tokens.tolist()
    Path(data.path).write_text("aa cc")
    second = _build(data, tokenizer).tokens.tolist()
    tokenizer.eos_token = "a"
    third = _build(data, tokenizer)
    assert first != second
    assert third.tokens[-1] == third.eos_token_id == tokenizer.convert_tokens_to_ids("a")
    data.document_separator = "none"
    _build(data, tokenizer)
    assert len(list(Path(data.cache_folder, "tokens").glob("*.bin"))) == 4


def _zero_end_with_ones(file):
    file.write_bytes(file.read_bytes()[:-2] + b"\x01\x00")


def _change_header(file):
    header = read_json(file.with_suffix(".json"))
    write_json(file.with_suffix(".json"), header | {"num_tokens": header["num_tokens"] + 1})


@pytest.mark.parametrize("damage", [_zero_end_with_ones, _change_header])
def test_damaged_cache_is_rebuilt(data, tokenizer, damage):
    expected = _build(data, tokenizer).tokens.tolist()
    (file,) = Path(data.cache_folder, "tokens").glob("*.bin")
    content, header = file.read_bytes(), file.with_suffix(".json").read_bytes()
    damage(file)
    assert _build(data, tokenizer).tokens.tolist() == expected
    assert (file.read_bytes(), file.with_suffix(".json").read_bytes()) == (content, header)
    assert not list(file.parent.glob("*.tmp"))


def test_concurrent_processes_build_once(data, run_ranks, tmp_path, monkeypatch):
    """Each notes what it builds, and takes so long that the other must wait."""

    def slow(module, name):
        function = getattr(module, name)

        def run(*args):
            with (tmp_path / "builds").open("a") as file:
                file.write(f"{name}\n")
            time.sleep(0.4)
            return function(*args)

        monkeypatch.setattr(module, name, run)

    def rank_main():
        corpus = build_corpus(data)
        dist.barrier()
        return build_tokens(data, corpus, build_tokenizer(data, corpus)).tokens.tolist()

    slow(tokenizer_module, "train_bpe")
    slow(tokens_module, "_write")
    first, second = run_ranks(2, rank_main)
    assert first == second and len(first) > 1000
    assert (tmp_path / "builds").read_text().split() == ["train_bpe", "_write"]
