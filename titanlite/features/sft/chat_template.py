"""The tokenizer's chat template: the only module that renders one.

Every exception of the template becomes a `RowError`, and its current date is the same for the whole
run.
"""

import re
from dataclasses import replace
from datetime import date as Date
from typing import Any, cast

from jinja2.exceptions import TemplateError

from titanlite.base.errors import DataError
from titanlite.checkpoint.start import Start
from titanlite.config import JobConfig
from titanlite.data.tokenizer import HFTokenizer
from titanlite.features.sft.forms import Messages
from titanlite.features.sft.readers import RowError

REMEDY = (
    "Correct the row, set an argument of the template with data.chat_template_kwargs, or give "
    "another template with data.chat_template."
)

_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Exceptions of a template: its own raise_exception, and errors of expressions on unexpected values.
_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def render_chat(
    tokenizer: HFTokenizer,
    date: str,
    messages: Messages,
    tools: Messages | None,
    arguments: dict[str, Any],
    *,
    prompt: bool = False,
) -> str:
    """Render a conversation, with the generation prompt if `prompt`; `date` is the current date in
    ISO format, empty for today.

    Raises:
        DataError: the tokenizer has no chat template.
        RowError: the template fails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if not tokenizer.chat_template:
        raise DataError(
            "data: the rows are chats, but the tokenizer has no chat template. Set "
            "data.chat_template to a Jinja file, use the tokenizer of a chat model "
            "(data.tokenizer_path), or give prompt and completion as text."
        )
    try:
        template = tokenizer.get_chat_template(None, cast(Any, tools))
    except ValueError as error:  # several named templates without a default
        raise DataError(f"data: {error} Set data.chat_template to a Jinja file.") from None
    special: dict[str, Any] = tokenizer.special_tokens_map
    try:
        texts, _ = render_jinja_template(
            [cast(Any, messages)],
            tools=cast(Any, tools),
            chat_template=set_date(template, date),
            add_generation_prompt=prompt,
            continue_final_message=False,  # set here, so that no row's argument can set it
            return_assistant_tokens_mask=False,
            **special | arguments,
        )
    except _ERRORS as error:
        said = str(error).strip().rstrip(".") or type(error).__name__
        raise RowError("template failed", f"the chat template fails: {said}. {REMEDY}") from None
    return texts[0]


def set_date(template: Any, date: str) -> Any:
    """Return `template`, or each of several by name, with `date` in place of its calls for the
    current date.
    """
    if isinstance(template, dict):
        return {name: set_date(text, date) for name, text in template.items()}
    if not date or not template:
        return template
    return _TODAY.sub(
        lambda match: repr(Date.fromisoformat(date).strftime(match.group(2))), template
    )


def set_arguments(template: Any, arguments: dict[str, Any]) -> Any:
    """Return `template`, or each of several by name, with default values of its arguments written
    into its text, so that every renderer of a saved template uses them.
    """
    if isinstance(template, dict):
        return {name: set_arguments(text, arguments) for name, text in template.items()}
    # Jinja reads Python's literals.
    given = [
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in sorted(arguments.items())
    ]
    return "".join([*given, template])


def with_chat_date(job: JobConfig, start: Start | None) -> JobConfig:
    """Return `job` with the date for chat templates: the setting, the date in the checkpoint
    `start`, or today.
    """
    if job.data.dataset not in ("examples", "images") or job.data.chat_date:
        return job
    date = (start and start.progress.chat_date) or Date.today().isoformat()
    return replace(job, data=replace(job.data, chat_date=date))
