"""Rendering of a checkpoint's chat template in a sandbox with limits. Templates are untrusted code.

The available functions follow transformers, so templates give equal texts. Tokens are not used
here.
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
from tilewright.models.tokenizer.template_limits import (
    BoundedEnvironment,
    TooCostlyError,
    bounded,
)

Message = Mapping[str, object]


class ChatTemplate:
    """A compiled chat template. ``where`` is its file in messages.

    Raises:
        CheckpointError: The template does not compile.
    """

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where
        self._reads_parts: dict[str, bool] = {}  # by role, known after a first chat
        try:
            with bounded(source):
                self._template = _environment().from_string(source)
        # Constant parts are computed here, and the rest becomes Python code: both can raise any
        # exception.
        except Exception as error:
            raise CheckpointError(
                f"{where}: chat template: {one_line(error)}; allowed: a Jinja template"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        must_read: bool = False,
    ) -> str:
        """Return the prompt text for ``messages`` (``role``, ``content`` and further template
        fields).

        Keys with the value None are dropped, as in transformers. A message's text is a string, or a
        list of parts if the template reads parts only.

        Args:
            messages: The chat.
            add_generation_prompt: Begin the assistant's turn at the end.
            special_tokens: Texts of named tokens.
            tools: JSON schemas of callable functions. None: no tools.
            variables: Further template variables, for example ``enable_thinking``.
            must_read: Reject text omitted by the template.

        Raises:
            RequestError: There are no messages, or the template rejects or fails on them.
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
            unread = self._probe(given, plain)
            text = self._render({**given, "messages": [self._as_read(each) for each in plain]})
        # Template code can raise any exception of Python operators.
        except Exception as error:
            raise RequestError(f"{self.where}: chat template: {one_line(error)}") from None
        if must_read and unread:
            raise RequestError(
                f"{self.where}: chat template: leaves out the text of role {unread[0]!r}; "
                "allowed: messages of roles that it reads, or another template"
            )
        return text

    def _render(self, given: Mapping[str, object]) -> str:
        with bounded(self.source, given):
            return self._template.render(given)

    def _probe(self, given: Mapping[str, object], messages: Sequence[Message]) -> list[str]:
        """Determine how the template reads each role's text. Return unread roles.

        The chat is rendered with a mark for each new role's text: as a string, then as a part.
        """
        texts = [(str(each.get("role")), _text_of(each)) for each in messages]
        left = dict.fromkeys(role for role, text in texts if text and text.strip())
        unread = [role for role in left if role not in self._reads_parts]
        for is_parts in (False, True):
            if not unread:
                break
            marks = {role: f"zq{at}qz" for at, role in enumerate(unread)}
            chat = [
                {**each, "content": _content(marks[role], is_parts)}
                if role in marks and text
                else self._as_read(each)
                for each, (role, text) in zip(messages, texts, strict=True)
            ]
            try:
                found = self._render({**given, "messages": chat}).lower()
            except TooCostlyError:
                raise
            except Exception:  # form not supported; a real failure occurs again later
                continue
            self._reads_parts |= {role: is_parts for role, mark in marks.items() if mark in found}
            unread = [role for role in unread if role not in self._reads_parts]
        # Many templates omit the assistant's text next to its calls.
        plain = {
            role
            for each, (role, text) in zip(messages, texts, strict=True)
            if text and text.strip() and not each.get("tool_calls")
        }
        return [role for role in unread if role in plain]

    def _as_read(self, message: Message) -> Message:
        """Return the message with its text in the template's form."""
        text, is_parts = _text_of(message), self._reads_parts.get(str(message.get("role")))
        if text is None or is_parts is None or (is_parts and isinstance(message["content"], list)):
            return message
        return {**message, "content": _content(text, is_parts)}


def _text_of(message: Message) -> str | None:
    """Return a message's text from a string or a list of text parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(text := part.get("text"), str):
            return None
        texts.append(text)
    return "".join(texts)


def _content(text: str, is_parts: bool) -> object:
    return [{"type": "text", "text": text}] if is_parts else text


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training. Only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names beginning with an underscore."""

    def __repr__(self) -> str:
        return "<Namespace>"  # its values may include the namespace itself

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
    """Convert to JSON types, so that the template finds no methods with side effects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(f"a message holds a {type(value).__name__}; allowed: JSON values")
