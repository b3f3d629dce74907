"""Chat templates that loop, grow and nest: refused soon, before they take memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.limits import guarded, guarded_apart
from tilewright.models.tokenizer import template_limits
from tilewright.models.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello <b>"}]
MANY = "range(99999)"
GROW = "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.s }}"


def run(template: str) -> None:
    ChatTemplate(template, "m.gguf").render(MESSAGES)


LOOPS = (
    f"{{% for i in {MANY} %}}{{% for j in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for i in {MANY} %}}{{{{ {MANY} | sum }}}}{{% endfor %}}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    f"{{% set r = {MANY} | list %}}"
    "{% for x in r recursive %}{% if loop.depth < 9 %}{{ loop(r) }}{% endif %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 1.5 | round(10 ** 9, 'ceil') }}",
)
GROWTH = (
    GROW % ("'aaaa'", "{% set ns.s = ns.s ~ ns.s %}"),
    GROW % ("'aaaa'", "{% set ns.s = ns.s + ns.s %}"),
    GROW % ("'aaaa'", "{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = b %}"),
    GROW % ("'aaaa'", "{% set ns.s = [ns.s, ns.s] | join %}"),
    GROW % ("'aaaa'", "{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    GROW % ("'aaaa'", "{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    GROW % ("[1]", "{% set ns.s = ns.s + ns.s %}"),
    GROW % ("[1]", "{% set ns.s = [ns.s, ns.s] %}"),
    GROW % ("[1]", "{% set ns.s = [ns.s] * 2 %}"),
    GROW % ("(1,)", "{% set ns.s = (ns.s, ns.s) %}"),
    GROW % ("{}", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    GROW % ("{}", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
)
SIZES = (
    *("'a' * 10 ** 10", "[1] * 10 ** 10", "10 ** 10 * 'a'", "'a'.center(10 ** 10)"),
    *("'a' | center(10000000000)", "'a'.ljust(10 ** 10)", "'a'.rjust(10 ** 10)"),
    *("'a'.zfill(10 ** 10)", "'\\t'.expandtabs(10 ** 10)", "'%10000000000d' % 1"),
    *("'%*d' % (10 ** 10, 1)", "'%(a(b)c)10000000000d' % {'a(b)c': 1}"),
    *("'{:10000000000}'.format(1)", "'{:{}}'.format(1, 10 ** 10)", "'%10000000000d' | format(1)"),
    *("'{a[}]:10000000000}'.format(a={'}': 1})", "'{a:10000000000}'.format_map({'a': 1})"),
    *(
        "(1).to_bytes(10 ** 10, 'big')",
        "'a'.encode().ljust(10 ** 10)",
        "'a\\nb' | indent(10 ** 10)",
    ),
    *("[1] | batch(10 ** 10, 'x') | list", "[1] | tojson(indent=10 ** 10)"),
    *("['a'] | map('center', 10 ** 10) | list", "['a'] | map('tojson', indent=10 ** 10) | list"),
    *(
        "('a' * 10 ** 6).replace('a', 'b' * 10 ** 6)",
        "('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6)",
    ),
    *("('a' * 10 ** 6).join('b' * 10 ** 6)", "'a'.translate({97: 'b' * 10 ** 7})"),
    *(f"{MANY} | join({MANY} | join)", f"[{MANY} | list] * 10000", "lipsum(n=10 ** 9)"),
)
FORMS = (
    *("{{ " + "(" * 3000, "{{ " + "[" * 500 + "]" * 500 + " }}", "{% if 1 %}" * 3000),
    *("{% for a in b %}" * 40 + "{% endfor %}" * 40, "{{ " + "1" * 5000 + " }}", "{#" * 100_000),
    *("{%" * 50_000, "{{" * 50_000, "{{ a" + ".a" * 5000 + " }}", "{{ a" + "|a" * 5000 + " }}"),
    *("{{ " + "-" * 20_000 + "1 }}", "{{ " + "1+" * 5000 + "1 }}", "{% raw %}" * 20_000),
    *("{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{{ '\x1b[31m' | x }}"),
)


@pytest.mark.parametrize(
    ("template", "seconds"), [*((each, 0.1) for each in LOOPS), *((each, 2.0) for each in GROWTH)]
)
def test_loops_and_growth_end(
    template: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", seconds)
    said = guarded_apart(lambda: run(template), file_size=len(template))
    assert said.startswith("m.gguf: chat template: ")


@pytest.mark.parametrize("expression", SIZES)
def test_large_values_are_refused_before_they_are_made(expression: str) -> None:
    template = "{{ (" + expression + ") | length }}"
    said = guarded(lambda: run(template), file_size=len(template))
    assert said.startswith("m.gguf: chat template: ")


@pytest.mark.parametrize("template", FORMS, ids=lambda text: f"{text[:14]}-{len(text)}")
def test_odd_forms(template: str) -> None:
    assert guarded(lambda: run(template), file_size=len(template), factor=2000)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '**{}** 123456'.format(1) }}", "**1** 123456"),
        ("{{ '{a}'.format_map({'a': 1}) }}", "1"),
        ("{{ '**%s** 123456 %5d%%' % (1, 2) }}", "**1** 123456     2%"),
        ("{{ 'a' | center(5) }}{{ [1, 2] | tojson(indent=2) }}", "  a  [\n  1,\n  2\n]"),
        (
            "{% for x in [1, 2, 3] %}{{ loop.length }}{{ loop.last }}{% endfor %}",
            "3False" * 2 + "3True",
        ),
        ("{% for x in [[1], [2]] recursive %}{{ x }}{{ loop.depth }}{% endfor %}", "[1]1[2]1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% else %}none{% endfor %}", "a1"),
        ("{% for x in nothing %}{% else %}none{% endfor %}", "none"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{{ ('a', 'b')[1] }}", "ABb"),
        ("{{ 'x' * 3 + 'y' }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}", "xxxy10243[1, 2]"),
    ],
)
def test_what_templates_ordinarily_do_is_as_before(template: str, text: str) -> None:
    assert ChatTemplate(template, "m.gguf").render(MESSAGES) == text


def test_the_budget_grows_with_the_chat() -> None:
    """Ten passes over four megabytes, piece by piece."""
    template = ChatTemplate(
        "{% for m in messages %}{{ (m.content + 'x').replace('\\n', ' ').strip().split('|')[-1] }}"
        "{{ m.content | trim | upper | length }}{% endfor %}",
        "m.gguf",
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "word\n" * 800}] * 1000
    assert len(template.render(messages)) > 4_000_000


names = st.sampled_from(("messages", "ns", "range", "loop", "namespace", "x", "self", "dict"))
atoms = st.one_of(names, st.sampled_from(("1", "10**9", "'a'", "[]", "{}", "none", "1.5", "''")))
joins = st.sampled_from(("+", "*", "**", "%", "~", "==", " in ", " and ", ",", "//", "."))
calls = st.sampled_from(("({0})", "[{0}]", "{0}|join", "{0}|list", "{0}|tojson", "{0}|string"))
expressions = st.recursive(
    atoms,
    lambda inner: (
        st.builds("{}{}{}".format, inner, joins, inner)
        | st.builds(lambda form, text: form.replace("{0}", text), calls, inner)
        | st.builds("{}({})".format, names, inner)
    ),
    max_leaves=8,
)
statements = st.recursive(
    expressions.map("{{{{ {} }}}}".format),
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("{{% for x in {} %}}{}{{% endfor %}}".format, expressions, inner)
        | st.builds("{{% set x = {} %}}{}".format, expressions, inner)
        | st.builds("{{% if {} %}}{}{{% endif %}}".format, expressions, inner)
    ),
    max_leaves=6,
)


@given(template=statements | st.text(st.sampled_from("{}%#-'\"| \n(.)[x]1*"), max_size=60))
def test_any_template(template: str) -> None:
    guarded(lambda: run(template), file_size=len(template), factor=2000)
