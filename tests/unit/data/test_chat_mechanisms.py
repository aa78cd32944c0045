"""Mechanisms of chat templates, with one small template for each, and the rule's result.

The prompt is the prompt of inference. The trained text follows it in the rendered chat, up to the
token that ends the turn. The tests compare tokens, not only texts.
"""

import json

import pytest
from files import read_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from unit.data.templates import CHATML

from titanlite.features.sft.chat import ANSWER, END, NO_END, TRAINED, ChatRenderer
from titanlite.features.sft.chat_template import set_arguments, set_date
from titanlite.features.sft.encode import ExampleEncoder, count_trained, encode_prompt
from titanlite.features.sft.readers import RowError

CASES = read_table("chat_templates")
ASK = """{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TURN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""
BARE = {"function": {"name": "get_time", "arguments": {}}}


def chat(*texts):
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def messages_of(case):
    return chat(*case["texts"]) if "texts" in case else json.loads(case["messages"])


def encode(tokenizer, messages, **more):
    encoder = ExampleEncoder(ChatRenderer(tokenizer), "messages")
    (found,) = encoder.encode([{"messages": messages, **more}])
    if isinstance(found, RowError):
        raise found
    return [document for example in found for document in example], encoder


def check(tokenizer, messages, *answers, end, **more):
    """Each answer follows the tokens of its prompt, in full, and ends with `end`, where generation
    stops.
    """
    documents, encoder = encode(tokenizer, messages, **more)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = []
    for document in documents:
        ids, flags = document["id"].tolist(), document["flags"].tolist()
        starts = [i for i in range(1, len(ids)) if flags[i] & ANSWER and not flags[i - 1] & ANSWER]
        for start in starts:
            stop = next(i for i in range(start, len(ids)) if flags[i] & END) + 1
            row = {"messages": messages[: places[len(found)]], **more}
            assert ids[:start] == encode_prompt(tokenizer, row)
            assert all(flag & TRAINED for flag in flags[start:stop]) and not any(
                flags[stop : stop + 1]
            )
            found.append(tokenizer.decode(ids[start:stop]))
    assert found == [answer + end for answer in answers]
    assert encoder.stop_token_ids == {tokenizer.convert_tokens_to_ids(end)}
    return documents


@pytest.mark.parametrize("case", CASES["followed"])
def test_answers_follow_their_prompts(make_tokenizer, case):
    tokenizer = make_tokenizer(case["template"])
    documents = check(tokenizer, messages_of(case), *case["answers"], end=case["end"])
    assert len(documents) == case.get("documents", len(documents))
    assert all((document["flags"] & END).any() for document in documents)


def test_a_seam_is_seen_however_far_a_token_reaches():
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    # each merge needs the one before, from the last letter on
    long = ["y" * n + "z" for n in range(41)]
    merges = [*(("y", text) for text in long[:-1]), ("\u010a", long[-1])]
    vocab = {token: i for i, token in enumerate([*symbols, *long[1:], "\u010a" + long[-1]])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", chat_template=CHATML
    )
    for text, num_documents in ((long[-1], 2), (long[-2], 1)):
        documents = check(tokenizer, chat("a", text, "c", "d"), text, "d", end="<|im_end|>")
        assert len(documents) == num_documents


@pytest.mark.parametrize("value", [{"a": True}, [{"b": None}]])
def test_a_nested_argument_is_never_written_as_python_would(make_tokenizer, value):
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<think>{{ c.function.name }} \
{% if c.function.arguments is string %}{{ c.function.arguments }}\
{% else %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endif %}\
</think>{% endfor %}<|im_end|>
{% endfor %}"""
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": value}}}
    plain = {"type": "function", "function": {"name": "f", "arguments": {"k": 5}}}
    tokenizer = make_tokenizer(template + ASK)
    for one, shown in ((plain, "k=5"), (call, json.dumps({"k": value}))):
        messages = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [one]}]
        documents, _ = encode(tokenizer, messages)
        assert f"<think>f {shown}</think>" in tokenizer.decode(documents[0]["id"])


def test_an_argument_stays_an_object_where_text_would_show_nothing(make_tokenizer):
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}\
{% if c.function.arguments is mapping %} {{ c.function.arguments }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": True}}}
    messages = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = make_tokenizer(template + ASK)
    (document,), _ = encode(tokenizer, messages)
    assert "f {'k': True}<|im_end|>" in tokenizer.decode(document["id"])


@pytest.mark.parametrize("case", CASES["dropped"])
def test_each_part_that_is_dropped_is_named(make_tokenizer, case):
    template = case["template"]
    names = ("first", "second")
    calls = [{"function": {"name": name, "arguments": {"place": f"of {name}"}}} for name in names]
    answer = {"role": "assistant", "content": "done", "tool_calls": calls}
    answer["reasoning_content"] = "why"
    row = {"messages": [*chat("asked"), answer]}
    if "tools" in case["says"]:
        row["tools"] = [{"function": {"name": "tool", "description": "described"}}]
    with pytest.raises(RowError, match=f"the chat template drops {case['says']}"):
        encode(make_tokenizer(template), **row)
    renderer = ChatRenderer(make_tokenizer(template), warn_of_dropped=True)
    encoder = ExampleEncoder(renderer, "messages")
    (found,) = encoder.encode([row])
    assert not isinstance(found, RowError) and sum(encoder.renderer.counts.values()) > 0


@pytest.mark.parametrize("case", CASES["whole"])
def test_an_answer_is_whole_and_ends(make_tokenizer, case):
    """This includes a call without arguments; an equal second row has equal tokens."""
    tokenizer = make_tokenizer(case["template"])
    encoder = ExampleEncoder(ChatRenderer(tokenizer), "messages")
    first, second = encoder.encode([{"messages": messages_of(case)}] * 2)
    assert not isinstance(first, RowError) and not isinstance(second, RowError)
    found = []
    for (one,), (other,) in zip(first, second, strict=True):
        assert one.tolist() == other.tolist()
        ids = one["id"][(one["flags"] & ANSWER) > 0].tolist()
        found.append(tokenizer.decode(ids))
    assert "".join(found) == "".join(case["answers"])  # turns may share a document
    assert encoder.stop_token_ids == set(tokenizer.encode(case["stops"], add_special_tokens=False))


def test_instructions_behind_a_call_do_not_end_it(make_tokenizer):
    tokenizer = make_tokenizer(CASES["instructed"]["template"])
    call = {"role": "assistant", "content": "", "tool_calls": [BARE]}
    (document,), _ = encode(tokenizer, [*chat("a"), call])
    answer = document["id"][(document["flags"] & ANSWER) > 0].tolist()
    assert tokenizer.decode(answer).endswith("}\n<|im_start|>")


def test_arguments_of_the_run_are_part_of_the_template(make_tokenizer):
    """Every program that renders a saved template uses these arguments; a row's own arguments take
    precedence.
    """
    thought = "{{ '<think></think>' if thinking is defined and not thinking }}{% endif %}"
    template = TURN + ASK.replace("{% endif %}", thought)
    off = make_tokenizer(set_arguments(template, {"thinking": False}))
    check(off, chat("a", "b"), "b", end="<|im_end|>")
    assert off.decode(encode_prompt(off, {"messages": chat("a")})).endswith("<think></think>")
    row = {"messages": chat("a"), "chat_template_kwargs": {"thinking": True}}
    assert not off.decode(encode_prompt(off, row)).endswith("<think></think>")


def test_a_run_has_one_date(make_tokenizer):
    template = "{{ strftime_now('%d %b %Y') }}" + TURN + ASK
    renderer = ChatRenderer(make_tokenizer(template), date="2025-02-03")
    encoder = ExampleEncoder(renderer, "messages")
    (found,) = encoder.encode([{"messages": chat("a", "b")}])
    assert not isinstance(found, RowError)
    text = make_tokenizer(template).decode(found[0][0]["id"].tolist())
    assert text.startswith("03 Feb 2025<|im_start|>")
    # Dates are part of cache keys.
    assert set_date(template, "2025-02-03") != set_date(template, "2025-02-04")


def test_a_greeting_may_come_first_untrained(make_tokenizer):
    greeting = {"role": "assistant", "content": "hi"}
    with pytest.raises(RowError, match=r'or give it "weight": 0'):
        encode(make_tokenizer(CHATML), [greeting, *chat("a", "b")])
    (document,), _ = encode(make_tokenizer(CHATML), [greeting | {"weight": 0}, *chat("a", "b")])
    assert count_trained(document) == 2


def test_a_turn_without_an_end_is_counted(make_tokenizer):
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    _, encoder = encode(make_tokenizer(template), chat("a", "b"))
    assert encoder.renderer.counts[NO_END] == 1 and not encoder.stop_token_ids
