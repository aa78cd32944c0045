"""Mechanisms of chat templates, with one small template for each, and the rule's result.

The prompt is the prompt of inference. The trained text follows it in the rendered chat, up to the
token that ends the turn. The tests compare tokens, not only texts.
"""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from unit.data.templates import CHATML

from titanlite.features.sft.chat import ANSWER, END, NO_END, TRAINED, ChatRenderer
from titanlite.features.sft.chat_template import set_arguments, set_date
from titanlite.features.sft.encode import ExampleEncoder, encode_prompt
from titanlite.features.sft.readers import RowError

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TURN = HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n%s{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<think>{{ c.function.name }} %s</think>{% endfor %}"

EMPTY_THOUGHT = TURN + ASK.replace("%s", "<think>\n\n</think>\n\n")
LEFT_OVER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}</think>{% "
    "endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}" + ASK.replace("%s", "<think></think>")
)
NEXT_HEADER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    + ASK.replace("%s", "")
)
REWRITTEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role != "
    "'tool' else 'gone' }}"
    "<|im_end|>\n{% endfor %}" + ASK.replace("%s", "")
)
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|eot_id|><|im_end|>{% endfor "
    "%}{% if messages[-1].role == 'assistant' or add_generation_prompt %}<|im_start|>assistant\n{% "
    "endif %}"
)
INNER_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}hm<|eot_id|>{% "
    "endif %}"
    "{{ m.content }}<|eot_id|><|im_end|>\n{% endfor %}" + ASK.replace("%s", "")
)
OTHER_LAST_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '</s>' if loop.last and "
    "m.role == 'assistant' else '<|im_end|>' }}{% endfor %}" + ASK.replace("%s", "")
)
AS_TEXT = (
    HEAD
    + "{{ m.content }}"
    + CALLS.replace("%s", "{{ '' + c.function.arguments }}")
    + "<|im_end|>\n{% endfor %}"
)
AS_REPR = (
    HEAD
    + "{{ m.content }}"
    + CALLS.replace("%s", "{{ c.function.arguments }}")
    + "<|im_end|>\n{% endfor %}"
)


def chat(*texts):
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def encode(tokenizer, messages, **more):
    encoder = ExampleEncoder(tokenizer, "messages", train_all=False)
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
        ids, flags = document.ids.tolist(), document.flags.tolist()
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


@pytest.mark.parametrize("template", [EMPTY_THOUGHT, LEFT_OVER])
def test_a_closed_empty_thought_belongs_to_the_prompt(make_tokenizer, template):
    documents = check(
        make_tokenizer(template), chat("a", "b", "c", "d"), "b", "d", end="<|im_end|>"
    )
    assert len(documents) == 2  # the second prompt's history has no empty thought


def test_the_next_header_ends_a_turn(make_tokenizer):
    (document,) = check(
        make_tokenizer(NEXT_HEADER), chat("a", "b", "c", "d"), "b", "d", end="<|im_start|>"
    )
    assert document.flags[-1] & END  # appended, because nothing follows


def test_history_may_be_rewritten(make_tokenizer):
    messages = [
        *chat("a", "b"),
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "d"},
    ]
    check(make_tokenizer(REWRITTEN), messages, "b", "d", end="<|im_end|>")


@pytest.mark.parametrize(
    ("template", "answer", "end"),
    [
        (TWO_ENDS, "b<|eot_id|>", "<|im_end|>"),
        (INNER_END, "hm<|eot_id|>b<|eot_id|>", "<|im_end|>"),
        (OTHER_LAST_END, "b", "</s>"),
    ],
)
def test_of_two_ends(make_tokenizer, template, answer, end):
    """Training ends with the last end token, but not with the next header that the rendered turn
    also shows.
    """
    check(make_tokenizer(template), chat("a", "b"), answer, end=end)


def test_an_added_token_proves_no_end(make_tokenizer):
    template = CHATML.replace("<|im_end|>\n", "</think><|im_end|>\n")
    check(make_tokenizer(template), chat("a", "b"), "b</think>", end="<|im_end|>")


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
        assert (
            len(check(tokenizer, chat("a", text, "c", "d"), text, "d", end="<|im_end|>"))
            == num_documents
        )


@pytest.mark.parametrize("value", [{"a": True}, [{"b": None}], ["x"], {"c": [False]}])
def test_a_nested_argument_is_never_written_as_python_would(make_tokenizer, value):
    each = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}" + (
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endif %}"
    )
    template = (
        HEAD
        + "{{ m.content }}"
        + CALLS.replace("%s", each)
        + "<|im_end|>\n{% endfor %}"
        + ASK.replace("%s", "")
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": value}}}
    plain = {"type": "function", "function": {"name": "f", "arguments": {"k": 5}}}
    tokenizer = make_tokenizer(template)
    for one, shown in ((plain, "k=5"), (call, json.dumps({"k": value}))):
        messages = [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [one]}]
        documents, _ = encode(tokenizer, messages)
        assert f"<think>f {shown}</think>" in tokenizer.decode(documents[0].ids)


@pytest.mark.parametrize("template", [AS_TEXT, AS_REPR])
def test_arguments_are_text_where_the_template_needs_text(make_tokenizer, template):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    messages = [*chat("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    template += ASK.replace("%s", "")
    check(make_tokenizer(template), messages, '<think>f {"x": "y"}</think>', end="<|im_end|>")


LOSSES = {
    "content": (
        "{{ [m.content, m.reasoning_content, m.tool_calls] if m.role == 'assistant' }}",
        r"messages\[0\], of the role 'user'",
    ),
    "thought": ("{{ m.content }}", r"messages\[1\]\.reasoning_content"),
    "name": (
        "{{ m.content }}{{ m.reasoning_content }}",
        r"messages\[1\]\.tool_calls, a call of 'first'",
    ),
    "second call": (
        "{{ m.content }}{{ m.reasoning_content }}{{ (m.tool_calls or [''])[0] }}",
        r"messages\[1\]\.tool_calls\[1\], a call of 'second'",
    ),
    "argument": (
        "{{ m.content }}{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}{{ "
        "c.function.name }}{% endfor %}",
        r"messages\[1\]\.tool_calls\[0\]\.function\.arguments\['place'\]",
    ),
    "tool": ("{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}", r"tools\[0\]\.name"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_each_part_that_is_dropped_is_named(make_tokenizer, what):
    shown, text = LOSSES[what]
    template = (
        HEAD + "{{ m.role }}" + shown + "<|im_end|>{% endfor %}" + ASK.replace("%s", "assistant")
    )
    names = ("first", "second")
    calls = [{"function": {"name": name, "arguments": {"place": f"of {name}"}}} for name in names]
    answer = {"role": "assistant", "content": "done", "tool_calls": calls}
    answer["reasoning_content"] = "why"
    row = {"messages": [*chat("asked"), answer]}
    if what == "tool":
        row["tools"] = [{"function": {"name": "tool", "description": "described"}}]
    with pytest.raises(RowError, match=f"the chat template drops {text}"):
        encode(make_tokenizer(template), **row)
    renderer = ChatRenderer(make_tokenizer(template), warn_of_dropped=True)
    encoder = ExampleEncoder(make_tokenizer(template), "messages", renderer=renderer)
    (found,) = encoder.encode([row])
    assert not isinstance(found, RowError) and sum(encoder.renderer.counts.values()) > 0


TOOL_CALL = "{% for c in m.tool_calls or [] %}%s{% endfor %}"
# gpt-oss's mechanism: a call is a separate turn, and only the last answer of a chat ends with </s>.
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}"
    + TOOL_CALL.replace("%s", " to={{ c.function.name }}<s>{{ c.function.arguments | tojson }}")
    + "<|eot_id|>{% else %}<s>{{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}"
    "{% endif %}{% endfor %}" + ASK.replace("\n%s", "")
)
# Qwen3-Coder's mechanism: a call is a mark.
MARKS = (
    HEAD
    + "{{ m.content }}"
    + TOOL_CALL.replace(
        "%s", "<function={{ c.function.name }}>{{ c.function.arguments.x }}</function>"
    )
    + "<|im_end|>\n{% endfor %}"
    + ASK.replace("%s", "")
)
# Command-R7B's mechanism: an answer ends before its turn.
ANSWER_END = TURN.replace("<|im_end|>", "<|eot_id|><|im_end|>") + ASK.replace("%s", "")
# Command-R+'s mechanism: instructions follow every chat, and a call ends only at the next header.
ROLE = "<|im_start|>{{ '<start_of_turn>' if m.role == 'assistant' else '<end_of_turn>' }}"
INSTRUCTED = (
    "{% for m in messages %}"
    + ROLE
    + "{{ m.content }}"
    + TOOL_CALL.replace("%s", "{{ c.function }}\n")
    + "{{ '' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
    "<|im_start|><s>Write 'call' to call.<|im_end|>"
    "{% if add_generation_prompt %}<|im_start|><start_of_turn>{% endif %}"
)
# Apertus's mechanism: after a result, a turn continues without a header.
LOOP = (
    "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]{% else %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>{{ m.role }}\n{% endif %}"
    "{{ m.content }}"
    + TOOL_CALL.replace("%s", "{{ c.function.name }}{{ c.function.arguments | tojson }}<|eot_id|>")
    + "{{ '' if m.tool_calls else '<|im_end|>' }}{% endif %}{% endfor %}"
    + ASK.replace("%s", "")
)
BARE = {"function": {"name": "get_time", "arguments": {}}}
CALLING = [*chat("a"), {"role": "assistant", "content": "", "tool_calls": [BARE]}]


@pytest.mark.parametrize(
    ("template", "messages", "answers", "stops"),
    [
        (CHANNELS, CALLING, [" to=get_time<s>{}<|eot_id|>"], "<|eot_id|>"),
        (CHANNELS, chat("a", "b"), ["<s>b</s>"], "</s>"),
        (MARKS, CALLING, ["<function=get_time></function><|im_end|>"], "<|im_end|>"),
        (ANSWER_END, chat("a", "b"), ["b<|eot_id|><|im_end|>"], "<|im_end|>"),
        (
            LOOP,
            [*CALLING, {"role": "tool", "content": "noon"}, *chat("a", "b")[1:]],
            ["get_time{}<|eot_id|>", "b<|im_end|>"],
            "<|eot_id|><|im_end|>",
        ),
    ],
)
def test_an_answer_is_whole_and_ends(make_tokenizer, template, messages, answers, stops):
    """This includes a call without arguments; an equal second row has equal tokens."""
    tokenizer = make_tokenizer(template)
    encoder = ExampleEncoder(tokenizer, "messages")
    first, second = encoder.encode([{"messages": messages}] * 2)
    assert not isinstance(first, RowError) and not isinstance(second, RowError)
    found = []
    for (one,), (other,) in zip(first, second, strict=True):
        assert one.ids.tolist() == other.ids.tolist() and one.flags.tolist() == other.flags.tolist()
        ids = one.ids[(one.flags & ANSWER) > 0].tolist()
        found.append(tokenizer.decode(ids))
    assert "".join(found) == "".join(answers)  # turns may share a document
    assert encoder.stop_token_ids == set(tokenizer.encode(stops, add_special_tokens=False))


def test_instructions_behind_a_call_do_not_end_it(make_tokenizer):
    (document,), _ = encode(make_tokenizer(INSTRUCTED), CALLING)
    answer = document.ids[(document.flags & ANSWER) > 0].tolist()
    assert make_tokenizer(INSTRUCTED).decode(answer).endswith("}\n<|im_start|>")


def test_arguments_of_the_run_are_part_of_the_template(make_tokenizer):
    """Every program that renders a saved template uses these arguments; a row's own arguments take
    precedence.
    """
    template = TURN + ASK.replace(
        "%s", "{{ '<think></think>' if thinking is defined and not thinking }}"
    )
    off = make_tokenizer(set_arguments(template, {"thinking": False}))
    check(off, chat("a", "b"), "b", end="<|im_end|>")
    assert off.decode(encode_prompt(off, {"messages": chat("a")})).endswith("<think></think>")
    row = {"messages": chat("a"), "chat_template_kwargs": {"thinking": True}}
    assert not off.decode(encode_prompt(off, row)).endswith("<think></think>")


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 99999999999999999 }}",
        "{{ m[0].x|tojson }}",
    ],
)
def test_what_is_too_much_for_python_is_an_error_of_its_row(make_tokenizer, template):
    deep = "a"
    for _ in range(5000):
        deep = [deep]
    call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": deep}}}],
    }
    for messages in (
        [*chat("a"), {"role": "assistant", "content": "b", "x": deep}],
        [*chat("a"), call],
    ):
        with pytest.raises(RowError):
            encode(make_tokenizer(template.replace("m[0]", "messages[-1]")), messages)


def test_a_run_has_one_date(make_tokenizer):
    template = "{{ strftime_now('%d %b %Y') }}" + TURN + ASK.replace("%s", "")
    renderer = ChatRenderer(make_tokenizer(template), date="2025-02-03")
    encoder = ExampleEncoder(make_tokenizer(template), "messages", renderer=renderer)
    (found,) = encoder.encode([{"messages": chat("a", "b")}])
    assert not isinstance(found, RowError)
    assert (
        make_tokenizer(template)
        .decode(found[0][0].ids.tolist())
        .startswith("03 Feb 2025<|im_start|>")
    )
    # Dates are part of cache keys.
    assert set_date(template, "2025-02-03") != set_date(template, "2025-02-04")


def test_a_greeting_may_come_first_untrained(make_tokenizer):
    greeting = {"role": "assistant", "content": "hi"}
    with pytest.raises(RowError, match=r'or give it "weight": 0'):
        encode(make_tokenizer(CHATML), [greeting, *chat("a", "b")])
    (document,), _ = encode(make_tokenizer(CHATML), [greeting | {"weight": 0}, *chat("a", "b")])
    assert document.num_trained == 2


def test_a_turn_without_an_end_is_counted(make_tokenizer):
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    _, encoder = encode(make_tokenizer(template), chat("a", "b"))
    assert encoder.renderer.counts[NO_END] == 1 and not encoder.stop_token_ids
