"""Renders a checkpoint's chat template, which is untrusted code, in a sandbox with limits.

What templates may use follows transformers, so the same template gives the same text. It does
not know tokens.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from tilewright.errors import CheckpointError, RequestError, one_line
from tilewright.models.tokenizer.template_limits import BoundedEnvironment, bounded

Message = Mapping[str, object]


class ChatTemplate:
    """A compiled chat template; ``where`` names its file in messages.

    Raises:
        CheckpointError: the template does not compile.
    """

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where
        try:
            with bounded(source):
                self._template = _environment().from_string(source)
        # Constant parts are computed here, the rest becomes Python: both can raise anything.
        except Exception as error:
            raise CheckpointError(f"{where}: chat template: {one_line(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of ``messages`` (``role``, ``content`` and what the template reads).

        Keys whose value is None are dropped, as transformers does. ``tools``: functions that may
        be called, as JSON schemas; None where there are none. ``variables``: what else the
        template may read, as ``enable_thinking``.

        Raises:
            RequestError: no messages, or messages that the template refuses or fails on.
        """
        if not messages:
            raise RequestError("messages = []: a chat has at least one message")
        plain = [
            {key: _plain(value) for key, value in message.items() if value is not None}
            for message in messages
        ]
        given: dict[str, object] = {"tools": _plain(tools), "documents": None}
        given |= {name: _plain(value) for name, value in (variables or {}).items()}
        given |= {**(special_tokens or {}), "messages": plain}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            with bounded(self.source, given):
                return self._template.render(given)
        # Template code can raise anything that Python operators raise.
        except Exception as error:
            raise RequestError(f"{self.where}: chat template: {one_line(error)}") from None


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names that begin with an underscore."""

    def __repr__(self) -> str:
        return "<Namespace>"  # its values may hold the namespace itself

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


@functools.cache
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    helpers: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": lambda *args, **values: dict(*args, **values),
    }
    environment.filters["tojson"] = _to_json
    environment.globals.update(helpers)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _plain(value: object) -> object:
    """Let only JSON's own types reach the template, which then finds no methods that do things."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(f"a message holds a {type(value).__name__}; allowed: JSON values")
