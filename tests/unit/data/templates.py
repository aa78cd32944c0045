"""Chat templates written for these tests: each has the shape of one that is in use."""

CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501

# Thoughts are shown behind the last message of a user only, and an answer without any gets empty
# ones.
THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 > ns.last %}<think>
{{ message.reasoning_content or '' }}
</think>

{% endif %}
{{- message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""  # noqa: E501

LLAMA3 = """{{ bos_token }}
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'tool' %}{{ message.content | tojson }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ message.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}<start_of_turn>{{ role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# No generation prompt, and the answer begins with a space.
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- endif %}{% endfor %}"""

# The generation prompt opens thoughts that the finished turn does not show.
OPEN_THOUGHT = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
