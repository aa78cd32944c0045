import random
from pathlib import Path

import pytest
from files import write_json
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.saving import save_tokenizer
from titanlite.config.data import DataSection
from titanlite.data.corpus import Corpus, build_corpus, build_text_corpus
from titanlite.data.tokenizer import (
    build_tokenizer,
    load_tokenizer,
    train_bpe,
)

TEXT = "def foo(x):  return x , 'e\u0301' \u00e9\r\n\t12345 \U0001f600 <|endoftext|> don 't \x00"


@pytest.fixture(scope="module")
def bpe(text_folder):
    return train_bpe(build_text_corpus(text_folder), 320)


@pytest.fixture
def built(data):
    return build_tokenizer(data, build_corpus(data))


@settings(max_examples=100)
@given(st.text())
def test_round_trip_loses_nothing(bpe, text):
    assert bpe.decode(bpe.encode(text).ids, skip_special_tokens=False) == text


def test_training_does_not_depend_on_document_order(text_folder, bpe):
    files = list(build_text_corpus(text_folder).files)
    for seed in range(2):
        random.Random(seed).shuffle(files)
        assert train_bpe(Corpus(tuple(files)), 320).to_str() == bpe.to_str()


def test_damaged_cache_is_rebuilt(data, built):
    (file,) = Path(data.cache_folder, "tokenizers").glob("*.json")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert len(build_tokenizer(data, build_corpus(data))) == 300
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "gpt_oss", "gemma3_text", "gpt_neox", "qwen3_5_text"]
)
def test_a_bpe_is_trained_in_the_form_that_the_model_s_class_reads(data, tmp_path, model_type):
    """Qwen2's class, for one, takes vocabulary and merges from tokenizer.json, and its own
    splitting and NFC.
    """
    tokenizer = build_tokenizer(data, build_corpus(data), model_type)
    save_tokenizer(tokenizer, tmp_path)
    write_json(tmp_path / "config.json", {"model_type": model_type})
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.encode(TEXT) == tokenizer.encode(TEXT) and len(theirs) == len(tokenizer) == 300
    splits_digits = model_type.startswith("qwen")
    assert (
        len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123")) == 3
    ) == splits_digits


def test_a_bpe_of_another_form_is_found_and_read_as_it_was_trained(built, tmp_path, caplog):
    """A folder of Qwen2 whose tokenizer.json has GPT-2's splitting: ours of earlier versions."""
    save_tokenizer(built, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.encode(TEXT) != built.encode(TEXT)
    assert load_tokenizer(tmp_path).encode(TEXT) == built.encode(TEXT)
    assert f"data: {tmp_path}: transformers' AutoTokenizer builds Qwen2Tokenizer" in caplog.text


def test_load_folder_file_and_folder_without_config(built, tmp_path):
    built.save_pretrained(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    for path in (tmp_path, tmp_path / "tokenizer.json", bare):
        loaded = build_tokenizer(DataSection(tokenizer_path=str(path)), Corpus(()))
        assert loaded.encode(TEXT) == built.encode(TEXT)
        assert loaded.eos_token_id == 0
