"""Chat templates: the same text as transformers, and failures in one line, in the sandbox."""

from __future__ import annotations

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
