"""Chat templates: the same text as transformers, and failures in one line, in the sandbox."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers.models import BPE

from tilewright.errors import CheckpointError, RequestError
from tilewright.models.tokenizer.chat_template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "You are «exact»."},
    {"role": "user", "content": "<b>1 < 2</b> & 👍\n"},
]


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{%- for m in messages %}\n  {% if loop.index > 5 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ eos_token }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }} {{ tools is none }} {{ pad_token is defined }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "{{ messages[0] | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ dict(a=1) }}",
        "{{ 'name' in messages[0] }}",
    ],
)
def test_templates_render_as_transformers(template: str) -> None:
    ours = ChatTemplate(template, "m.gguf")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(BPE()), **SPECIALS
    )
    messages = [{"role": "user", "content": "<é> 'q'", "name": None}, *MESSAGES]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        got = ours.render(messages, add_generation_prompt=prompt, special_tokens=SPECIALS)
        assert got == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set x = messages.append(1) %}", "unsafe|not safely"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange too big"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "not allowed"),
    ],
)
def test_template_failures_are_one_line(template: str, words: str) -> None:
    ours = ChatTemplate(template, "m.gguf")
    with pytest.raises(RequestError, match=words) as caught:
        ours.render(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ a", "{% generation %}", "{{ 'a' | nothing }}"]
)
def test_templates_that_do_not_compile(template: str) -> None:
    with pytest.raises(CheckpointError, match=r"^m\.gguf: chat template: ") as caught:
        ChatTemplate(template, "m.gguf")
    assert "\n" not in str(caught.value)


PARTS = "{%% for m in messages %%}<{{ m.role }}>%s{%% endfor %%}"
EACH_PART = (
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
SYSTEM_IS_TEXT = "{% if m.role == 'system' %}{{ m.content }}{% else %}" + EACH_PART + "{% endif %}"
FIRST_PART = "{{ m.content[0]['text'] + '' }}"  # fails on strings
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + EACH_PART + "{% endif %}"


@pytest.mark.parametrize("body", [EACH_PART, SYSTEM_IS_TEXT, FIRST_PART, EITHER, "{{ m.content }}"])
@pytest.mark.parametrize("is_parts", [False, True])
def test_template_that_reads_parts_or_strings_writes_all_text(body: str, is_parts: bool) -> None:
    template = ChatTemplate(PARTS % body, "m.gguf")
    for chat in (MESSAGES[1:], MESSAGES, [*MESSAGES, {"role": "assistant", "content": "a b"}]):
        expected = "".join(f"<{each['role']}>{each['content']}" for each in chat)
        given: list[dict[str, Any]] = [*chat]
        if is_parts:
            given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
        for _ in range(2):
            assert template.render(given, must_read=True) == expected


def test_template_that_leaves_text_out_is_refused() -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content | upper }}{% endfor %}"
    template = ChatTemplate(users, "m.gguf")
    assert template.render(MESSAGES[1:], must_read=True) == MESSAGES[1]["content"].upper()
    empty = [{"role": "system", "content": " "}, MESSAGES[1]]
    assert template.render(empty, must_read=True) == MESSAGES[1]["content"].upper()
    with pytest.raises(RequestError, match=r"m\.gguf: .* role 'system'; allowed: ") as caught:
        template.render(MESSAGES, must_read=True)
    assert "\n" not in str(caught.value)
    assert template.render(MESSAGES) == MESSAGES[1]["content"].upper()
    beside = "{% for m in messages %}{% if m.tool_calls %}call{% else %}{{ m.content }}{% endif %}"
    calls = {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}
    found = ChatTemplate(beside + "{% endfor %}", "m.gguf").render([calls], must_read=True)
    assert found == "call", "what is said beside a call may be left out"
