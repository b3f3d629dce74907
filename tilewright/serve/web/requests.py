"""Request bodies as types, with decoding and checks.

Knows neither tokens nor engine limits. Decoded bodies are well formed and in range.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from tilewright.compiler.sampling.params import (
    BIAS,
    MAX_BIASED,
    MAX_LOGPROBS,
    plain_names,
    range_of,
)
from tilewright.serve.web.errors import invalid, unsupported

MAX_STOPS = 16
MAX_PROMPTS = 64

_Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 31)]
Token: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_Bias: TypeAlias = Annotated[float, Meta(ge=BIAS.low, le=BIAS.high)]


def no_json() -> msgspec.Raw:
    """Return a default for fields that the API schema omits."""
    return msgspec.Raw(b"null")


TokenIds: TypeAlias = Annotated[list[Token], Meta(min_length=1)]


class StreamOptions(Struct, frozen=True):
    """A stream's options: whether and how often usage is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Struct, frozen=True):
    """A JSON schema in OpenAI's wrapper. It is enforced with and without ``strict``."""

    schema: msgspec.Raw = msgspec.field(default_factory=no_json)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """Answer format. ``schema`` is llama.cpp's, for ``json_object``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=no_json)


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """Structured output in vLLM's form. A single field is allowed."""

    json: msgspec.Raw = msgspec.field(default_factory=no_json)
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """A chat message. Unknown keys are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


def _ranged(name: str) -> tuple[str, Any, None]:
    """Return a sampling parameter's field. None: the client gives no value."""
    span = range_of(name)
    low = {"gt": span.low} if span.is_above else {"ge": min(span.low, span.off or span.low)}
    return name, Annotated[type(span.low), Meta(**low, le=span.high)] | None, None


if TYPE_CHECKING:

    class SamplingFields(Struct, kw_only=True, frozen=True):
        """Sampling parameters in a body."""
else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields", map(_ranged, plain_names()), kw_only=True, frozen=True
    )


def sampling_values(request: SamplingFields) -> dict[str, Any]:
    """Return a body's sampling parameters by name, without missing parameters."""
    values = {}
    for name in plain_names():
        if (value := getattr(request, name)) is not None:
            span = range_of(name)
            values[name] = span.low if value == span.off else value
    return values


class Common(SamplingFields, kw_only=True, frozen=True):
    """Common fields in chat and text completions. None: absent."""

    model: str | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop: Annotated[str, Meta(max_length=1000)] | list[_Stop] | None = None
    stop_token_ids: Annotated[list[Token], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=MAX_BIASED)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    timings: bool | None = None
    return_token_ids: bool | None = None
    speculative: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    is_chat: ClassVar[bool] = False

    @property
    def output_limit(self) -> int | None:
        """Maximum output token count. None: the free context."""
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Top token count with log probabilities. None: no log probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the output begins with the prompt."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(Common, kw_only=True, frozen=True):
    """Body for ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    audio: Any = None
    modalities: list[str] | None = None

    is_chat: ClassVar[bool] = True

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common, kw_only=True, frozen=True):
    """Body for ``POST /v1/completions``."""

    prompt: (
        str
        | Annotated[
            list[str | TokenIds | Token],
            Meta(min_length=1),
        ]
    )
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as text or token ids.

        Raises:
            ApiError: for a list of mixed types, or too many prompts.
        """
        return prompt_list(self.prompt, "prompt", MAX_PROMPTS)


def prompt_list(
    values: str | Sequence[str | list[int] | int], where: str, most: int
) -> list[str | list[int]]:
    """Return a field's prompts: text, token ids, or a list with at most ``most`` entries.

    Raises:
        ApiError: for a list of mixed types, or too many prompts.
    """
    if isinstance(values, str):
        return [values]
    kinds = {type(each) for each in values}
    if len(kinds) > 1:
        raise invalid(f"{where}: a list of texts, of ids, or of lists of ids", where)
    if kinds == {int}:
        return [[each for each in values if isinstance(each, int)]]
    if len(values) > most:
        raise invalid(f"{where}: {len(values)}; allowed: up to {most}", where)
    return [each for each in values if not isinstance(each, int)]


class TokenizeRequest(Struct, frozen=True):
    """Body for ``POST /tokenize``: ``prompt``, ``messages`` or ``content``."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    content: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None


class DetokenizeRequest(Struct, frozen=True):
    """Body for ``POST /detokenize``."""

    tokens: Annotated[list[Token], Meta(max_length=1 << 22)]
    model: str | None = None


class TemplateRequest(Struct, frozen=True):
    """Body for ``POST /apply-template``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    model: str | None = None


_T = TypeVar("_T")
_READERS: dict[type, tuple[msgspec.json.Decoder[Any], frozenset[str]]] = {}
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def decode(body: bytes, kind: type[_T]) -> tuple[_T, list[str]]:
    """Decode a body as ``kind``. Return it with its unknown top-level keys.

    Raises:
        ApiError: 400 with the field, the mistake and the allowed values.
    """
    decoder, known = _reader(kind)
    try:
        record = decoder.decode(body)
        keys = _KEYS.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _AT.search(text)
        param = place.group(1) if place is not None and place.group(1) else None
        said = _AT.sub("", text)
        raise invalid(f"{param}: {said}" if param else said, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deep", code="invalid_json") from None
    return record, [key for key in keys if key not in known]


def _reader(kind: type) -> tuple[msgspec.json.Decoder[Any], frozenset[str]]:
    """Return a type's cached decoder and keys. A new decoder resolves all annotations."""
    if kind not in _READERS:
        known = frozenset(field.encode_name for field in msgspec.structs.fields(kind))
        _READERS[kind] = msgspec.json.Decoder(kind), known
    return _READERS[kind]


def check_common(request: Common) -> None:
    """Check the values that are well formed but unsupported.

    Raises:
        ApiError: 400 with the field's name.
    """
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        raise invalid(f"stop: {len(request.stop)} strings; allowed: up to {MAX_STOPS}", "stop")
    if request.best_of is not None and request.best_of > 1:
        raise unsupported("best_of", "allowed: 1; n requests several choices")
    if request.use_beam_search:
        raise unsupported("use_beam_search", "there is no beam search")
    if request.seed is not None and not -(1 << 63) <= request.seed < 1 << 63:
        raise invalid(f"seed: {request.seed}; allowed: 64-bit integers", "seed")


def check_chat(request: ChatRequest) -> None:
    """Check the unsupported fields of chats. Raises ApiError 400 with the field's name."""
    check_common(request)
    for name in ("functions", "function_call", "prediction", "audio"):
        if getattr(request, name) is not None:
            raise unsupported(name, "this server does not do that")
    if request.modalities not in (None, ["text"]):
        raise unsupported("modalities", "allowed: text")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs: only together with logprobs: true", "top_logprobs")
