"""The body of ``POST /v1/responses``, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tilewright.serve.responses.items import messages_of
from tilewright.serve.web.errors import invalid, unsupported
from tilewright.serve.web.requests import (
    ChatMessage,
    ChatRequest,
    NamedSchema,
    ResponseFormat,
    SamplingFields,
    no_json,
    sampling_values,
)

MAX_ITEMS = 65536
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
_UNSUPPORTED = {
    "background": "answers are not made in the background",
    "conversation": "allowed: previous_response_id",
    "prompt": "there are no stored prompts; allowed: input",
}


class TextFormat(Struct, frozen=True):
    """Text format. A JSON schema is enforced regardless of ``strict``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=no_json)
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    """Text options. ``verbosity`` is accepted and has no effect."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(Struct, frozen=True):
    """Reasoning options. Summaries are accepted and not made."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponsesRequest(SamplingFields, kw_only=True, frozen=True):
    """The body of ``POST /v1/responses``. Every field defaults to None."""

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None

    @property
    def is_stored(self) -> bool:
        """Whether later requests may name the response."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants log probabilities with the text."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def check_responses(request: ResponsesRequest) -> None:
    """Refuse fields without support by raising an ApiError with status 400."""
    for name, said in _UNSUPPORTED.items():
        if getattr(request, name) not in (None, False):
            raise unsupported(name, said)
    if request.truncation == "auto":
        raise unsupported("truncation", "auto; allowed: disabled")
    for at, each in enumerate(request.include or ()):
        if each not in _INCLUDED:
            said = f"include[{at}]: {each[:100]!r}; allowed: {', '.join(_INCLUDED)}"
            raise invalid(said, f"include[{at}]")


def chat_of(request: ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """Return the chat request. ``items`` begins with the earlier conversation.

    Raises:
        ApiError: Status 400 for hosted tools or bad items.
    """
    messages = messages_of(items)
    if not messages:
        raise invalid("input: empty; allowed: a text, or at least one item", "input")
    if request.instructions is not None:
        messages.insert(0, ChatMessage("system", request.instructions))
    reasoning = request.reasoning
    return ChatRequest(
        messages=messages,
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        **sampling_values(request),
        seed=request.seed,
        logprobs=request.wants_logprobs or None,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        tools=_tools(request.tools or ()) or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        chat_template_kwargs=request.chat_template_kwargs,
        priority=request.priority,
        cache_salt=request.cache_salt,
        stream=request.stream,
    )


def _tools(declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions in the nested form of chats."""
    tools = []
    for at, each in enumerate(declared):
        if each.get("type") != "function":
            where = f"tools[{at}].type"
            raise invalid(f"{where}: {str(each.get('type'))[:100]!r}; allowed: function", where)
        function = {key: value for key, value in each.items() if key != "type"}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        kind = str(choice.get("type"))[:100]
        said = f"tool_choice.type: {kind!r}; allowed: function"
        raise invalid(said, "tool_choice.type")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    text_format = text.format
    if text_format.type != "json_schema":
        return ResponseFormat(text_format.type)
    schema = NamedSchema(
        text_format.schema, text_format.name, text_format.description, text_format.strict
    )
    return ResponseFormat(text_format.type, schema)
