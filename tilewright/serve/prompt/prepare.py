"""Token ids and sampling parameters from a checked request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.errors import RequestError
from tilewright.images.prompt import PromptImage
from tilewright.runtime.messages import EngineReady
from tilewright.serve.prompt.template import TemplateFacts
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.tool_request import RequestedTools
from tilewright.serve.web.errors import invalid, refuse
from tilewright.serve.web.requests import ChatMessage, Common, sampling_values

_CHARACTERS_A_TOKEN = 256
"""Maximum length of a token. A text above this length per position cannot fit."""

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as token ids, with its text (if given as text) and its images."""

    text: str
    tokens: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


def render_chat(
    coder: TextCoder,
    messages: Sequence[ChatMessage],
    *,
    facts: TemplateFacts,
    tools: RequestedTools | None = None,
    variables: Mapping[str, object] | None = None,
    continues: bool = False,
    opens: bool = True,
) -> str:
    """Render a chat with the checkpoint's chat template.

    Args:
        coder: the tokenizer.
        messages: the request's messages.
        facts: known properties of the template.
        tools: the request's tools.
        variables: variables for the template.
        continues: whether the answer continues the last message.
        opens: whether the text ends with the beginning of the assistant's turn.

    Raises:
        ApiError: 400 without a template, or if it refuses the messages.
    """
    given = [_plain_message(message, at) for at, message in enumerate(messages)]
    template_tools = tools.given if tools is not None and facts.tells_tools else None
    try:
        plain = facts.messages(given, () if tools is None else tools.tools)
        text = coder.apply_chat_template(
            plain, opens and not continues, tools=template_tools, variables=variables
        )
    except (RequestError, RecursionError) as error:
        raise refuse(error, "template_error", "messages") from None
    last = str(plain[-1].get("content") or "")
    if not continues:
        return text
    if plain[-1]["role"] != "assistant" or not last.strip() or last.strip() not in text:
        said = "continue_final_message: the last message is not text of the assistant"
        raise invalid(said, "continue_final_message")
    return text[: text.rindex(last.strip())] + last


def _plain_message(message: ChatMessage, at: int) -> dict[str, Any]:
    """Return a message for templates: developer becomes system, content becomes a text."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    refusal = plain.pop("refusal", "")
    if message.role != "assistant":
        refusal = ""
    if message.role == "developer":
        plain["role"] = "system"
    if isinstance(message.content, list) and {"type": "image"} in message.content:
        plain["content"] = [_item_of(item, message.role, at) for item in message.content]
        return plain
    if isinstance(message.content, list):
        plain["content"] = "".join(_text_of(part, message.role, at) for part in message.content)
    elif message.content is None:
        if not message.tool_calls and not refusal:
            said = "a text, or a list of text parts; null only beside tool_calls or a refusal"
            raise invalid(f"messages[{at}].content: {said}", f"messages[{at}].content")
        plain["content"] = ""
    plain["content"] = "\n".join(filter(None, (plain["content"], refusal)))
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    return plain


def _item_of(item: Mapping[str, Any], role: str, at: int) -> dict[str, str]:
    """Return an image, or a text without further keys."""
    if item == {"type": "image"}:
        return {"type": "image"}
    return {"type": "text", "text": _text_of(item, role, at)}


def _text_of(part: Mapping[str, Any], role: str, at: int) -> str:
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    kind = part.get("type", "text")
    text = part.get(kind) if kind in kinds else None
    if not isinstance(text, str):
        where, known = f"messages[{at}].content", ", ".join(kinds)
        raise invalid(f"{where}: a part of type {kind!r}; allowed: {known}", where)
    return text


def encode(
    coder: TextCoder, text: str, ready: EngineReady, *, add_special: bool
) -> TokenizedPrompt:
    """Encode a text as token ids.

    Raises:
        ApiError: 400 for invalid Unicode, or for a text that cannot fit.
    """
    if len(text) > _CHARACTERS_A_TOKEN * ready.max_positions:
        raise _too_long(f"{len(text)} characters", ready)
    try:
        return TokenizedPrompt(text, tuple(coder.encode(text, add_special)))
    except RequestError as error:
        raise refuse(error) from None


def check_prompt(prompt: TokenizedPrompt, ready: EngineReady, param: str) -> None:
    """Check that a prompt is not empty, fits, and has the vocabulary's ids.

    Raises:
        ApiError: 400.
    """
    if not prompt.tokens:
        raise invalid(f"{param}: no token; allowed: at least one", param)
    if len(prompt.tokens) > ready.max_positions:
        raise _too_long(f"{len(prompt.tokens)} tokens", ready)
    placeholders = {prompt.tokens[placed.first] for placed in prompt.images}
    largest = max(token for token in (0, *prompt.tokens) if token not in placeholders)
    if largest >= ready.vocab_size:
        raise invalid(f"{param}: token {largest}; allowed: 0 to {ready.vocab_size - 1}", param)


def _too_long(said: str, ready: EngineReady) -> Exception:
    return invalid(
        f"the prompt has {said}; allowed: {ready.max_positions} tokens, and at least one of "
        "the answer behind them",
        code="context_length_exceeded",
    )


def sampling_for(
    request: Common,
    prompt: TokenizedPrompt,
    ready: EngineReady,
    coder: TextCoder,
    *,
    defaults: Mapping[str, float],
    has_grammar: bool,
) -> SamplingParams:
    """Return the sampling parameters for an answer. A limit above the free context is reduced.

    With ``has_grammar``, end tokens always stop the answer: they show that the grammar is complete.

    Raises:
        ApiError: 400 with the invalid parameter's name.
    """
    left = ready.max_positions + 1 - len(prompt.tokens)
    limit, logprobs = request.output_limit, request.num_top
    most = min(left, limit or left)
    chosen = {**defaults, **sampling_values(request)}
    chosen["top_k"] = int(chosen.get("top_k", 0))
    seed = request.seed if request.seed is not None else secrets.randbits(_SEED_BITS)
    min_tokens = request.min_tokens or 0
    if limit is not None and min_tokens > limit:
        raise invalid(f"min_tokens: {min_tokens}; allowed: 0 to {limit}", "min_tokens")
    ends = () if request.ignore_eos and not has_grammar else coder.eos_ids
    try:
        return SamplingParams(
            **chosen,
            logit_bias=_bias(request.logit_bias or {}, ready.vocab_size),
            seed=seed,
            max_tokens=most,
            min_tokens=min(min_tokens, most),
            stop_token_ids=tuple(dict.fromkeys((*ends, *_stop_ids(request, ready)))),
            logprobs=logprobs,
            prompt_logprobs=logprobs if request.echoes else None,
        )
    except RequestError as error:
        raise refuse(error) from None


def _stop_ids(request: Common, ready: EngineReady) -> tuple[int, ...]:
    for token in request.stop_token_ids or ():
        if token >= ready.vocab_size:
            most = ready.vocab_size - 1
            raise invalid(f"stop_token_ids: {token}; allowed: 0 to {most}", "stop_token_ids")
    return tuple(request.stop_token_ids or ())


def _bias(requested: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = {}
    for key, value in requested.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            said = f"logit_bias: token {key[:20]!r}; allowed: 0 to {vocab_size - 1}"
            raise invalid(said, "logit_bias")
        biases[int(key)] = value
    return tuple(biases.items())
