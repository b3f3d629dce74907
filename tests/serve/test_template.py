"""What chat templates read, and that messages are made to fit them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.serve.scripted import byte_coder
from tilewright.serve.prompt.prepare import render_chat
from tilewright.serve.prompt.template import TemplateFacts, read_template
from tilewright.serve.tools.shapes import ToolSpec
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.requests import ChatMessage

EACH = "{% for m in messages %}"
CALLS = "{% for c in m.tool_calls or [] %}"
END = "{% endfor %}"
SAID = "{{ m.content }}"
OBJECTS = f"{EACH}{SAID}{CALLS}<tool_call>{{{{ c.function | tojson }}}}{END}{END}"
TEXTS = f"{EACH}{CALLS}{{{{ c.function.name + c.function.arguments }}}}{END}{END}"
IN_SYSTEM = f"{EACH}{{% if m.tools %}}<|tool|>{{{{ m.tools }}}}<|/tool|>{{% endif %}}{SAID}{END}"
VARIABLES = "{{ enable_thinking }}{{ reasoning_effort }}"
PICKY = (
    "{% if tools %}[TOOL_CALLS]{% for t in tools %}{% for k, v in "
    "t.function.parameters.properties | items %}{{ t.function.name + k + v.description }}"
    f"{{% endfor %}}{{% endfor %}}{{% endif %}}{EACH}{CALLS}{{% if c.id | length != 9 %}}"
    "{{ raise_exception('nine') }}{% endif %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.name + m.tool_call_id }}{% endif %}{% endfor %}"
)
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{at}", "type": "function", "function": {"name": "f", "arguments": given}}
            for at, given in enumerate(('{"a": "é"}', "no JSON"))
        ],
    },
    {"role": "tool", "content": "7", "tool_call_id": "call_0"},
    {"role": "tool", "content": "8", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "So.", "tool_calls": []},
]


def facts(template: str, forced: str | None = None) -> TemplateFacts:
    return read_template(byte_coder(template), forced)


def written(template: str, forced: str | None = None, **given: Any) -> str:
    found = facts(template, forced).messages(HISTORY, **{"tools": (), **given})
    return byte_coder(template).apply_chat_template(found, must_read=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (OBJECTS, {"writes_calls": True}),
        (TEXTS, {"writes_calls": True, "wants_objects": False}),
        (IN_SYSTEM, {"reads_tools": True, "tools_in_system": True}),
        (PICKY, {"reads_tools": True, "writes_calls": True}),
        (
            "{{ enable_thinking }}{{ reasoning_effort }}",
            {"variables": ("enable_thinking", "reasoning_effort")},
        ),
        ("{{ raise_exception('no') }}", {}),
    ],
)
def test_templates_are_known_by_probes(template: str, expected: dict[str, Any]) -> None:
    found = facts(template)
    assert (found.format and found.format.name) == {IN_SYSTEM: "phi4", PICKY: "mistral"}.get(
        template
    )
    assert found == TemplateFacts(**{**expected, "format": found.format})


def test_arguments_are_objects_or_text_as_the_template_wants() -> None:
    assert '<tool_call>{"name": "f", "arguments": {"a": "é"}}' in written(OBJECTS)
    assert '"arguments": "no JSON"' in written(OBJECTS)
    assert written(TEXTS) == 'f{"a": "é"}fno JSON'


def test_ids_and_names_are_what_picky_templates_want() -> None:
    text = written(PICKY)
    results = text[text.rindex("}") + 1 :]
    assert len(results) == 2 * len("f123456789") and results[0] == results[10] == "f"
    assert results[1:10].isalnum() and results[1:10] != results[11:]


def test_tools_go_where_the_template_looks() -> None:
    tools = (ToolSpec("f", "d", {"type": "object"}),)
    text = written(IN_SYSTEM, tools=tools)
    assert text.startswith('<|tool|>[{"name": "f", "description": "d"')
    assert '<|tool_call|>[{"name": "f", "arguments": {"a": "é"}}' in text
    assert "u<|tool_call|>" in text and text.endswith("So.")
    plain = f"{EACH}({{{{ m.role }}}}){{{{ m.content }}}}{{% endfor %}}"
    text = written(plain, "gemma", tools=tools)
    assert text.startswith("(system)You may call") and text.count("(user)") == 2
    result = "<tool_response>\n{}\n</tool_response>"
    joined = f"(user){result.format(7)}\n{result.format(8)}(assistant)So."
    assert f'(assistant)[f(a="é"), f()]{joined}' in text


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def rendered(template: str, *messages: dict[str, Any], **asked: Any) -> str:
    """The prompt of a request with these messages."""
    coder = byte_coder(template)
    found = msgspec.convert(messages, list[ChatMessage])
    return render_chat(coder, found, facts=read_template(coder, None), **asked)


def test_template_that_reads_parts_is_given_parts() -> None:
    user = {"role": "user", "content": "u"}
    split = {"role": "user", "content": [{"type": "text", "text": "v"}, {"text": "w"}]}
    system = {"role": "developer", "content": "s"}
    answer = {"role": "assistant", "content": "a"}
    assert rendered(PARTS, user) == "<user>u<assistant>"
    expected = "<system>s<user>u<assistant>a<user>vw<assistant>"
    assert rendered(PARTS, system, user, answer, split) == expected
    assert rendered(PARTS, user, answer, continues=True) == "<user>u<assistant>a"


def test_template_that_leaves_the_user_out_is_400() -> None:
    with pytest.raises(ApiError, match="role 'user'") as caught:
        rendered(f"{EACH}{{{{ m.role }}}}{END}", {"role": "user", "content": "u"})
    assert (caught.value.status, caught.value.code) == (400, "template_error")


REFUSAL = {"type": "refusal", "refusal": "No."}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": [REFUSAL]}, "No."),
        ({"content": [{"type": "text", "text": "So. "}, REFUSAL], "refusal": None}, "So. No."),
        ({"content": "So.", "refusal": "No."}, "So.\nNo."),
        ({"content": "So.", "refusal": None}, "So."),
    ],
)
def test_refusal_of_an_earlier_turn_is_its_text(answer: dict[str, Any], text: str) -> None:
    user = {"role": "user", "content": "u"}
    for template in (f"{EACH}<{{{{ m.role }}}}>{SAID}{END}", PARTS):
        found = rendered(template, user, {"role": "assistant", **answer}, user, opens=False)
        assert found == f"<user>u<assistant>{text}<user>u"


def test_refusal_of_a_user_is_no_text() -> None:
    for message in ({"content": None, "refusal": "No."}, {"content": [REFUSAL]}):
        with pytest.raises(ApiError, match=r"messages\[0\].content.*text"):
            rendered(PARTS, {"role": "user", **message})
