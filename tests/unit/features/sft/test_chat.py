"""What of a chat is trained, compared text by text: [[...]] is trained."""

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from unit.data.templates import CHATML, GEMMA, LLAMA3, MARKED, MISTRAL, OPEN_THOUGHT, THINKING

from titanlite.base.errors import DataError
from titanlite.features.sft.chat import ANSWER, NO_END, TRAINED
from titanlite.features.sft.encode import Document, ExampleEncoder
from titanlite.features.sft.forms import Form
from titanlite.features.sft.readers import RowError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def say(*texts: str, system: str = "") -> dict[str, Any]:
    """A row of messages, user and assistant in turns."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


def mark(tokenizer: PreTrainedTokenizerFast, document: Document, bit: int = TRAINED) -> str:
    """The text of a document, with what has `bit` in double brackets."""
    text, start = "", 0
    ids, flags = document.ids.tolist(), (document.flags & bit).tolist()
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or bool(flags[stop]) != bool(flags[start]):
            part = tokenizer.decode(ids[start:stop])
            text += f"[[{part}]]" if flags[start] else part
            start = stop
    return text


def encode(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], form: Form = "messages", *, train_all: bool = False
) -> list[tuple[Document, ...]]:
    (found,) = ExampleEncoder(tokenizer, form, train_all=train_all).encode([row])
    if isinstance(found, RowError):
        raise found
    return found


def marked(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], form: Form = "messages", **kwargs: Any
) -> list[str]:
    return [mark(tokenizer, document) for example in encode(tokenizer, row, form, **kwargs) for document in example]


def test_chatml(make_tokenizer: MakeTokenizer) -> None:
    assert marked(make_tokenizer(CHATML), say("one", "two", "three", "four", system="be")) == [
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[[two<|im_end|>]]\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[[four<|im_end|>]]\n"
    ]


def test_prompt_tokens_are_those_of_inference(make_tokenizer: MakeTokenizer) -> None:
    """An answer that begins with a newline does not merge with the one of the template."""
    tokenizer = make_tokenizer(CHATML)
    row = say("what", "\nis the answer", "to", "\n\nthe question")
    ((document,),) = encode(tokenizer, row)
    whole = tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"]
    assert whole != document.ids.tolist()  # else this test shows nothing
    for turn in (1, 3):
        prompt = tokenizer.apply_chat_template(row["messages"][:turn], tokenize=True, add_generation_prompt=True)
        ids = prompt["input_ids"]
        if turn == 1:
            assert document.ids[: len(ids)].tolist() == ids
        starts = [
            i for i in range(1, len(document.ids)) if document.flags[i] & TRAINED > document.flags[i - 1] & TRAINED
        ]
        assert tokenizer.decode(document.ids[: starts[turn // 2]].tolist()) == tokenizer.decode(ids)
    assert tokenizer.decode(document.ids.tolist()) == tokenizer.decode(whole)


def test_template_that_rewrites_history_gives_one_example_per_answer(make_tokenizer: MakeTokenizer) -> None:
    row = say("one", "two", "three", "four")
    row["messages"][1]["reasoning_content"] = "hm"
    assert marked(make_tokenizer(THINKING), row) == [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[[<think>\nhm\n</think>\n\ntwo<|im_end|>]]",
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nfour<|im_end|>]]",
    ]


def test_template_that_rewrites_history_keeps_one_turn_in_one_example(make_tokenizer: MakeTokenizer) -> None:
    """Tool calls behind the same question are not history; their thoughts stay."""
    call = {"role": "assistant", "content": "call", "reasoning_content": "a"}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "r"}]
    row = {"messages": [*messages, {"role": "assistant", "content": "done", "reasoning_content": "b"}]}
    assert marked(make_tokenizer(THINKING), row) == [
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[<think>\na\n</think>\n\ncall<|im_end|>]]\n"
        "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n[[<think>\nb\n</think>\n\ndone<|im_end|>]]\n"
    ]


def test_template_arguments_of_a_row(make_tokenizer: MakeTokenizer) -> None:
    row = say("one", "two") | {"chat_template_kwargs": {"enable_thinking": False}}
    assert marked(make_tokenizer(THINKING), row) == [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[two<|im_end|>]]\n"
    ]


def test_llama3(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(LLAMA3)
    (text,) = marked(tokenizer, say("one", " two ", system="be"))
    assert text == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "one<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[two<|eot_id|>]]"
    )
    ((document,),) = encode(tokenizer, say("one", "two"))
    assert document.ids.tolist().count(tokenizer.bos_token_id) == 1


def test_gemma(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(GEMMA)
    assert marked(tokenizer, say("one", "two")) == [
        "<s><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n[[two<end_of_turn>]]\n"
    ]
    with pytest.raises(RowError, match=r"the chat template fails: System role not supported\. Correct the row, or"):
        encode(tokenizer, say("one", "two", system="be"))


def test_mistral(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(MISTRAL, eos="</s>")
    assert marked(tokenizer, say("one", "two", "three", "four")) == [
        "<s>[INST] one [/INST][[ two</s>]][INST] three [/INST][[ four</s>]]"
    ]
    with pytest.raises(RowError, match=r"drops messages\[0\], of the role 'system'"):
        encode(tokenizer, say("one", "two", system="be"))


def test_generation_marks(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(MARKED)
    start = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    middle = "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    row = say("one", "two", "three", "four")
    assert marked(tokenizer, row) == [f"{start}[[two<|im_end|>]]{middle}[[four<|im_end|>]]\n"]
    pair = {"prompt": row["messages"][:3], "completion": row["messages"][3:]}
    assert marked(tokenizer, pair, "prompt_completion") == [f"{start}two<|im_end|>{middle}[[four<|im_end|>]]\n"]
    row["messages"][1]["weight"] = 0
    assert marked(tokenizer, row) == [f"{start}two<|im_end|>{middle}[[four<|im_end|>]]\n"]


def test_prompt_that_opens_a_thought_which_the_answer_lacks(make_tokenizer: MakeTokenizer) -> None:
    """An error, also where marks say what is to be trained: inference would never ask for this answer."""
    marked_too = OPEN_THOUGHT.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    )
    for template in (OPEN_THOUGHT, marked_too):
        text = r"messages\[1\] after another prompt than at inference: '<think>.n' there, 'two"
        with pytest.raises(RowError, match=text):
            encode(make_tokenizer(template), say("one", "two"))


def test_train_on_all(make_tokenizer: MakeTokenizer) -> None:
    for template in (CHATML, THINKING, MARKED):
        tokenizer = make_tokenizer(template)
        row = say("one", "two", "three", "four")
        ((document,),) = encode(tokenizer, row, train_all=True)
        assert (document.flags & TRAINED).all()
        answers = mark(tokenizer, document, ANSWER)
        assert answers.endswith("four<|im_end|>]]\n") and ("[[two" in answers) == (template != THINKING)
    assert len(encode(make_tokenizer(CHATML), {"messages": [{"role": "user", "content": "hi"}]}, train_all=True)) == 1


def test_weight_0_is_not_trained(make_tokenizer: MakeTokenizer) -> None:
    row = say("one", "two", "three", "four")
    row["messages"][1]["weight"] = 0
    (text,) = marked(make_tokenizer(CHATML), row)
    assert "assistant\ntwo<|im_end|>" in text and "[[four<|im_end|>]]" in text


def test_tools_and_calls_reach_the_template(make_tokenizer: MakeTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    row = {
        "messages": [
            {"role": "user", "content": "what"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": '{"sum": "4"}'},
            {"role": "assistant", "content": "four"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }
    (text,) = marked(make_tokenizer(CHATML), row)
    # The arguments are an object in the text, not quoted JSON.
    assert '[[<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>]]\n<|im_start|>tool\n{"sum"' in text
    assert text.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "add",')
    assert (
        '[[{"name": "add", "parameters": {"a": 2}}<|eot_id|>]]'
        in marked(make_tokenizer(LLAMA3), row | {"tools": []})[0]
    )
    for template, what in ((LLAMA3, r"tools\[0\]\.name"), (GEMMA, r"messages\[1\].tool_calls, a call of 'add'")):
        with pytest.raises(RowError, match=f"the chat template drops {what}"):
            encode(make_tokenizer(template), row if template == LLAMA3 else row | {"tools": None})


def test_sharegpt(make_tokenizer: MakeTokenizer) -> None:
    turns = [("human", "one"), ("gpt", "two"), ("human", "three"), ("function_call", '{"name": "f", "arguments": {}}')]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "system": "be"}
    (text,) = marked(make_tokenizer(CHATML), row)
    assert text.startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\none<|im_end|>")
    assert "[[two<|im_end|>]]" in text and '[[<call>{"name": "f", "arguments": {}}</call><|im_end|>]]' in text


def test_content_parts_are_joined(make_tokenizer: MakeTokenizer) -> None:
    row = say("one", "two")
    row["messages"][0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in marked(make_tokenizer(CHATML), row)[0]


def test_prompt_and_completion(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(None)
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert marked(tokenizer, row, "prompt_completion") == ["2 + 2 =[[ 4<|endoftext|>]]"]
    assert marked(tokenizer, row, "prompt_completion", train_all=True) == ["[[2 + 2 = 4<|endoftext|>]]"]
    row = {"prompt": "2 + 2 =", "completion": " 4<|endoftext|>"}  # as some data sets are written
    assert marked(tokenizer, row, "prompt_completion") == ["2 + 2 =[[ 4<|endoftext|>]]"]
    chat = make_tokenizer(CHATML)
    messages = say("one", "two", "three", "four")["messages"]
    row = {"prompt": messages[:3], "completion": messages[3:]}
    (text,) = marked(chat, row, "prompt_completion")
    assert "\ntwo<|im_end|>" in text and "[[four<|im_end|>]]" in text


def test_text(make_tokenizer: MakeTokenizer) -> None:
    """Text that spells a special token is text; the end of the document is trained."""
    tokenizer = make_tokenizer(None)
    ((document,),) = encode(tokenizer, {"text": "a<|im_end|>b"}, "text")
    assert mark(tokenizer, document) == "[[a<|im_end|>b<|endoftext|>]]"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in document.ids


def test_beginning_of_text_is_added_once(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id  # the tokenizer adds it by itself
    for prompt in ("one", "<s>one", ""):
        row = {"prompt": prompt, "completion": "two"}
        (text,) = marked(tokenizer, row, "prompt_completion")
        assert text == f"<s>{prompt.removeprefix('<s>')}[[two<|endoftext|>]]"
    assert marked(tokenizer, {"text": "one"}, "text")[0] == "[[<s>one<|endoftext|>]]"
    assert marked(tokenizer, say("one", "two"))[0].count("<s>") == 0  # the template writes none


def test_tokenizer_that_puts_a_space_before_every_text(make_tokenizer: MakeTokenizer) -> None:
    """The answer's own first token, not one with a second space."""
    tokenizer = make_tokenizer(CHATML)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace(prepend_scheme="always")])
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    spaced.chat_template = CHATML
    row = say("one", "two", "three", "four")
    ((document,),) = encode(spaced, row)
    whole = spaced.apply_chat_template(row["messages"], tokenize=True)["input_ids"]
    assert document.ids.tolist() == whole
    prompt = spaced.apply_chat_template(row["messages"][:1], tokenize=True, add_generation_prompt=True)["input_ids"]
    assert (document.flags[: len(prompt)] == 0).all() and document.flags[len(prompt)] & TRAINED
    alone = spaced("two<|im_end|>", add_special_tokens=False)["input_ids"]
    assert alone != whole[len(prompt) : len(prompt) + len(alone)]  # else this test shows nothing


PAIRS = [
    {"prompt": say("q")["messages"], "chosen": [{"role": "assistant", "content": "good"}]}
    | {"rejected": [{"role": "assistant", "content": "bad"}]},
    {"prompt": "q", "chosen": [{"role": "assistant", "content": "good"}]}
    | {"rejected": [{"role": "assistant", "content": "bad"}]},
    {"chosen": say("q", "good")["messages"], "rejected": say("q", "bad")["messages"]},
    {"prompt": "q", "chosen": say("q", "good")["messages"], "rejected": say("q", "bad")["messages"]},
    {"prompt": say("q")["messages"], "chosen": say("q", "good")["messages"], "rejected": say("q", "bad")["messages"]},
    {"prompt": say("q")["messages"], "chosen": "good", "rejected": "bad"},
]


@pytest.mark.parametrize("row", PAIRS)
def test_preference_pairs(make_tokenizer: MakeTokenizer, row: dict[str, Any]) -> None:
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    for template in (CHATML, MARKED):
        expected = [f"{start}[[good<|im_end|>]]\n", f"{start}[[bad<|im_end|>]]\n"]
        assert marked(make_tokenizer(template), row, "preference") == expected
    thinking = marked(make_tokenizer(THINKING), row, "preference")
    assert [text.split("[[")[1].split("]]")[0] for text in thinking] == [
        f"<think>\n\n</think>\n\n{answer}<|im_end|>" for answer in ("good", "bad")
    ]


def test_preference_pair_of_strings(make_tokenizer: MakeTokenizer) -> None:
    row = {"prompt": "q:", "chosen": " good", "rejected": " bad"}
    assert marked(make_tokenizer(None), row, "preference") == ["q:[[ good<|endoftext|>]]", "q:[[ bad<|endoftext|>]]"]


def test_pair_with_history_that_is_rewritten(make_tokenizer: MakeTokenizer) -> None:
    chosen, rejected = say("a", "b", "c", "d")["messages"], say("a", "x", "c", "d")["messages"]
    with pytest.raises(RowError, match="several answers, and the chat template rewrites earlier ones"):
        encode(make_tokenizer(THINKING), {"chosen": chosen, "rejected": rejected}, "preference")


def test_no_chat_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match=r"tokenizer has no chat template\. Set data\.chat_template"):
        encode(make_tokenizer(None), say("one", "two"))


def test_template_without_an_end_of_turn(make_tokenizer: MakeTokenizer) -> None:
    """The next message's first token ends the turn; where there is no such token either, this is counted."""
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", ""))
    encoder = ExampleEncoder(tokenizer, "messages", train_all=False)
    list(encoder.encode([say("one", "two")]))
    assert encoder.stop_token_ids == {tokenizer.convert_tokens_to_ids("<|im_start|>")}
    single = (
        "{{ raise_exception('one turn') if messages | length > 2 }}{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    encoder = ExampleEncoder(make_tokenizer(single), "messages", train_all=False)
    list(encoder.encode([say("one", "two")]))
    assert encoder.renderer.counts[NO_END] == 1 and not encoder.stop_token_ids
