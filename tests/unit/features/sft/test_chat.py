"""What of a chat is trained, compared text by text: [[...]] is trained."""

import json

import pytest
import tokenizers
from files import read_table
from tokenizers import decoders, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from unit.data import templates
from unit.data.templates import CHATML, GEMMA, MISTRAL, OPEN_THOUGHT, THINKING

from titanlite.features.sft.chat import ANSWER, TRAINED, ChatRenderer
from titanlite.features.sft.encode import ExampleEncoder
from titanlite.features.sft.readers import RowError


def say(*texts, system=""):
    """A row of messages, user and assistant in turns."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages]}


def mark(tokenizer, document, bit=TRAINED):
    """The text of a document, with what has `bit` in double brackets."""
    text, start = "", 0
    ids, flags = document["id"].tolist(), (document["flags"] & bit).tolist()
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or bool(flags[stop]) != bool(flags[start]):
            part = tokenizer.decode(ids[start:stop])
            text += f"[[{part}]]" if flags[start] else part
            start = stop
    return text


def encode(
    tokenizer,
    row,
    form="messages",
    *,
    train_all=False,
):
    renderer = ChatRenderer(tokenizer, train_all=train_all)
    (found,) = ExampleEncoder(renderer, form).encode([row])
    if isinstance(found, RowError):
        raise found
    return found


def marked(tokenizer, row, form="messages", **kwargs):
    return [
        mark(tokenizer, document)
        for example in encode(tokenizer, row, form, **kwargs)
        for document in example
    ]


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


ASK, ANSWER_1, ASK_AGAIN, ANSWER_2 = say("one", "two", "three", "four")["messages"]


@pytest.mark.parametrize("case", read_table("rows")["chats"])
def test_rows_are_documents_with_trained_parts(make_tokenizer, case):
    name = case.get("template")
    eos = "</s>" if name == "MISTRAL" else "<|endoftext|>"
    tokenizer = make_tokenizer(name and getattr(templates, name), eos=eos)
    found = marked(tokenizer, json.loads(case["row"]), case["form"])
    short = [text.replace("<|im_start|>", "<").replace("<|im_end|>", ">") for text in found]
    assert short == case["documents"]


SIDES = {
    "text": lambda text: text,
    "answer": lambda text: [answer(text)],
    "chat": lambda text: [*say("q")["messages"], answer(text)],
}


def test_train_on_all(make_tokenizer):
    for template in (CHATML, THINKING):
        tokenizer = make_tokenizer(template)
        row = say("one", "two", "three", "four")
        ((document,),) = encode(tokenizer, row, train_all=True)
        assert (document["flags"] & TRAINED).all()
        answers = mark(tokenizer, document, ANSWER)
        assert answers.endswith("four<|im_end|>]]\n")
        assert ("[[two" in answers) == (template != THINKING)
    assert len(encode(make_tokenizer(CHATML), say("hi"), train_all=True)) == 1


def test_prompt_and_completion(make_tokenizer):
    tokenizer = make_tokenizer(None)
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert marked(tokenizer, row, "prompt_completion") == ["2 + 2 =[[ 4<|endoftext|>]]"]
    assert marked(tokenizer, row, "prompt_completion", train_all=True) == [
        "[[2 + 2 = 4<|endoftext|>]]"
    ]
    row = {"prompt": "2 + 2 =", "completion": " 4<|endoftext|>"}  # as some data sets are written
    assert marked(tokenizer, row, "prompt_completion") == ["2 + 2 =[[ 4<|endoftext|>]]"]


def test_special_tokens_in_a_text_are_spelled(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    ((document,),) = encode(tokenizer, {"text": "a<|im_end|>b"}, "text")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in document["id"]


def test_beginning_of_text_is_added_once(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    # the tokenizer adds it by itself
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    for prompt in ("<s>one", ""):
        row = {"prompt": prompt, "completion": "two"}
        (text,) = marked(tokenizer, row, "prompt_completion")
        assert text == f"<s>{prompt.removeprefix('<s>')}[[two<|endoftext|>]]"
    assert marked(tokenizer, {"text": "one"}, "text")[0] == "[[<s>one<|endoftext|>]]"
    assert marked(tokenizer, say("one", "two"))[0].count("<s>") == 0  # the template writes none


def test_tokenizer_that_puts_a_space_before_every_text(make_tokenizer):
    """The answer's own first token, not one with a second space."""
    tokenizer = make_tokenizer(CHATML)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Metaspace(prepend_scheme="always")]
    )
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    spaced.chat_template = CHATML
    row = say("one", "two", "three", "four")
    ((document,),) = encode(spaced, row)
    whole = spaced.apply_chat_template(row["messages"], tokenize=True)["input_ids"]
    assert document["id"].tolist() == whole
    prompt = spaced.apply_chat_template(
        row["messages"][:1], tokenize=True, add_generation_prompt=True
    )["input_ids"]
    flags = document["flags"]
    assert (flags[: len(prompt)] == 0).all() and flags[len(prompt)] & TRAINED
    alone = spaced("two<|im_end|>", add_special_tokens=False)["input_ids"]
    assert alone != whole[len(prompt) : len(prompt) + len(alone)]  # else this test shows nothing


@pytest.mark.parametrize(
    ("prompt", "side"),
    [
        ({"prompt": say("q")["messages"]}, "answer"),
        ({}, "chat"),
        ({"prompt": "q"}, "chat"),
        ({"prompt": say("q")["messages"]}, "text"),
    ],
)
def test_preference_pairs(make_tokenizer, prompt, side):
    row = {**prompt, "chosen": SIDES[side]("good"), "rejected": SIDES[side]("bad")}
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    expected = [f"{start}[[good<|im_end|>]]\n", f"{start}[[bad<|im_end|>]]\n"]
    assert marked(make_tokenizer(CHATML), row, "preference") == expected
    thinking = marked(make_tokenizer(THINKING), row, "preference")
    assert all("[[<think>\n\n</think>\n\n" in text for text in thinking) and len(thinking) == 2


REWRITTEN = {side: say("a", side, "c", "d")["messages"] for side in ("chosen", "rejected")}


@pytest.mark.parametrize(
    ("template", "form", "row", "problem"),
    [
        (
            GEMMA,
            "messages",
            say("one", "two", system="be"),
            r"fails: System role not supported\. Correct the row, set",
        ),
        (
            MISTRAL,
            "messages",
            say("one", "two", system="be"),
            r"drops messages\[0\], of the role 'system'",
        ),
        # The end of a turn is not always the same.
        (
            CHATML.replace("<|im_end|>", "{{ '<|im_end|>' if message.content|length < 40 }}"),
            "messages",
            say("one", "a" * 40),
            r"messages\[1\] after a different prompt",
        ),
        # Inference would never ask for this answer.
        (OPEN_THOUGHT, "messages", say("one", "two"), r"messages\[1\] .*: '<think>.n' there, 'two"),
        (
            THINKING,
            "preference",
            REWRITTEN,
            "several answers, and the chat template rewrites earlier ones",
        ),
    ],
)
def test_a_row_that_does_not_go_with_the_template_is_refused(
    make_tokenizer, template, form, row, problem
):
    with pytest.raises(RowError, match=problem):
        encode(make_tokenizer(template), row, form)
