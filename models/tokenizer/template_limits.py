"""Limits on a chat template's cost: a jinja2 sandbox that counts text, elements and seconds.

Each operation that enlarges or repeats a value passes through a hook in this file.
"""

from __future__ import annotations

import functools
import re
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2.nodes
from jinja2 import filters
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, SecurityError

MAX_SECONDS = 5.0
MIN_CHARACTERS = 1 << 24
_PER_INPUT = 64  # number of copies of the input a template may make
_STEP = 16  # cost of an element, a loop turn or a call, in characters
_MAX_BITS = 1 << 14

# Python value methods without larger results. All other methods are checked.
_HARMLESS = frozenset(
    (
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"),
        *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "upper", "lower"),
        *("title", "capitalize", "casefold", "swapcase", "removeprefix", "removesuffix", "encode"),
        *("decode", "items", "keys", "values", "get", "copy", "isalnum", "isalpha", "isascii"),
        *("isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace"),
        *("istitle", "isupper"),
    )
)
# Filters that select from their input, regardless of arguments.
_PICKING = frozenset(
    (
        *("attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last"),
        *("length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse"),
        *("select", "selectattr", "sort", "truncate", "unique"),
    )
)
_WIDTH = re.compile(r"\d{5}")
_PERCENT_WIDTH = re.compile(r"%\([^()]*\(|%(?:\([^()]*\))?[^a-zA-Z%(]*(?:\d{5}|\*)")


class TooCostlyError(SecurityError):
    """The error for a template beyond its text or time limit."""


@dataclass(slots=True)
class _Budget:
    """The remaining budget for the template in this context."""

    limit: int
    left: int
    deadline: float

    def charge(self, amount: int) -> None:
        self.left -= amount + _STEP
        if self.left < 0:
            raise TooCostlyError(f"it makes more than {self.limit} characters of text or elements")
        if time.monotonic() > self.deadline:
            raise TooCostlyError(f"it runs for more than {MAX_SECONDS:g} seconds")

    def check(self, amount: int) -> None:
        """Raise for a value of this size before its creation."""
        if amount > self.limit:
            raise TooCostlyError(f"a value larger than {self.limit} characters or elements")

    def size(self, *values: object) -> int:
        """Return the total characters and elements in values, with repetitions."""
        total, stack = 0, list(values)
        while stack:
            value = stack.pop()
            total += _STEP
            if isinstance(value, str | bytes):
                total += len(value)
            elif isinstance(value, int):
                total += value.bit_length() // 3
            elif isinstance(value, Mapping):
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, Collection):
                stack += value
            if total > self.limit:
                break
        self.check(total)
        return total


_budget: ContextVar[_Budget] = ContextVar("template_budget")


@contextmanager
def bounded(*given: object) -> Iterator[None]:
    """Compile or render a template in this block. The budget grows with the inputs.

    Raises:
        TooCostlyError: The template exceeds its budget.
    """
    unlimited = _Budget(1 << 62, 0, 0.0)
    limit = MIN_CHARACTERS + _PER_INPUT * unlimited.size(*given)
    token = _budget.set(_Budget(limit, limit, time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _budget.reset(token)


def _joined(parts: Iterable[object]) -> str:
    """Join the parts to a text."""
    budget, texts = _budget.get(), []
    for part in parts:
        text = part if isinstance(part, str) else str(_finalize(part))
        budget.charge(len(text))
        texts.append(text)
    return "".join(texts)


def _each(values: Iterable[object]) -> Iterator[object]:
    """Yield a loop's values and charge for each turn."""
    for value in values:
        _budget.get().charge(0)
        yield value


def _made(value: Any) -> Any:
    """Charge for a new value and return it."""
    budget = _budget.get()
    if isinstance(value, Collection):
        if not isinstance(value, str | bytes):
            budget.size(value)
        budget.charge(len(value))
    else:
        budget.charge(0)
    return value


class _Generator(CodeGenerator):
    """Routes loops, literals and joined texts through the environment's hooks."""

    def visit_For(self, node: jinja2.nodes.For, frame: Frame) -> None:  # noqa: N802
        hook = jinja2.nodes.EnvironmentAttribute("each")
        node.iter = jinja2.nodes.Call(hook, [node.iter], [], None, None)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._wrap("environment.joined((", lambda: self._items(node.nodes, frame), "))")

    def visit_List(self, node: jinja2.nodes.List, frame: Frame) -> None:  # noqa: N802
        self._wrap("environment.made(", lambda: CodeGenerator.visit_List(self, node, frame), ")")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._wrap("environment.made(", lambda: CodeGenerator.visit_Dict(self, node, frame), ")")

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        def inner() -> None:
            CodeGenerator.visit_Tuple(self, node, frame)

        if node.ctx == "load":
            self._wrap("environment.made(", inner, ")")
        else:
            inner()

    def _wrap(self, before: str, inner: Callable[[], None], after: str) -> None:
        self.write(before)
        inner()
        self.write(after)

    def _items(self, nodes: Iterable[jinja2.nodes.Node], frame: Frame) -> None:
        for node in nodes:
            self.visit(node, frame)
            self.write(", ")


class _Formatter(SandboxedFormatter):
    """``str.format`` without large widths. Values can supply widths."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDTH.search(format_spec):
            raise TooCostlyError("a format with a width of five digits or more")
        return super().format_field(value, format_spec)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits. Compiling and rendering need a `bounded` block."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "+", "%"})
    each, made, joined = staticmethod(_each), staticmethod(_made), staticmethod(_joined)
    concat = joined  # used at the end of macros, blocks and whole templates

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        del self.globals["lipsum"]
        self.filters = _BoundedFilters(self.filters)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, types.BuiltinMethodType) and __obj.__name__ not in _HARMLESS:
            _check_growth(__obj.__name__, __obj.__self__, (*args, *kwargs.values()))
        return _made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        if operator == "%" and isinstance(left, str | bytes):
            _check_percent(left if isinstance(left, str) else left.decode("latin-1"), right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_BITS:
                raise TooCostlyError(f"a number of more than {_MAX_BITS} bits")
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                each = len(sequence) if isinstance(sequence, str) else budget.size(sequence)
                budget.check(each * max(times, 0))
        return _made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            text = str(value.__self__)
            _check_fields(text.count("{"), (args, kwargs))
            if value.__name__ == "format_map":
                args, kwargs = (), *args
            return _Formatter(self).vformat(text, args, kwargs)

        return checked


class _BoundedFilters(dict[str, Callable[..., Any]]):
    """A table of filters with charges for their results."""

    def __init__(self, plain: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        for name, function in plain.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        # Context, evaluation context or environment come before the value.
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            value, rest = args[place], (*args[place + 1 :], *kwargs.values())
            if function is filters.FILTERS["format"]:
                _check_percent(str(value), rest)
            elif name not in _PICKING:
                _check_growth(name, value, rest)
            return _made(function(*args, **kwargs))

        super().__setitem__(name, wrapper)


def _finalize(value: object) -> object:
    """Charge for an expression's value before conversion to text."""
    if not isinstance(value, str):
        _budget.get().size(value)
    return value


def _check_growth(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Raise if a call's result may exceed the limit. At worst, all parts are as wide as the
    arguments.
    """
    budget = _budget.get()
    if name == "replace" and isinstance(value, str) and len(arguments) > 1:
        old, new = map(str, arguments[:2])
        budget.check(len(value) + value.count(old) * len(new))
        return
    widest = sum(abs(a) if isinstance(a, int) else budget.size(a) for a in arguments)
    budget.check((budget.size(value) + 1) * (widest + 1))


def _check_percent(text: str, values: object) -> None:
    """Raise for ``text % values`` with large widths, or with widths from values."""
    if _PERCENT_WIDTH.search(text):
        raise TooCostlyError("a format with a width of five digits or more, or one from a value")
    _check_fields(text.count("%"), values)


def _check_fields(num_fields: int, values: object) -> None:
    budget = _budget.get()
    budget.check(num_fields * (budget.size(values) + 10_000))
