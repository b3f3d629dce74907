"""Response bodies for chats and completions, complete and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tilewright.serve.output.choice import ChoiceStream, Scored, chat_logprobs, legacy_logprobs
from tilewright.serve.output.reasoning import AnswerDelta, CallPiece
from tilewright.serve.output.tool_calls import ToolCall
from tilewright.serve.prompt.texts import TextCoder

_MARK = "\x00the text\x00"


@dataclass(slots=True, kw_only=True)
class CompletionTask:
    """A client's request with its engine requests and its response form.

    Attributes:
        choices: choices in order, ``n`` for each prompt.
        client: name of the client's API key.
        unconstrained: reason for tool calls without an enforced schema.
        ignored: unknown fields of a row in a batch.
    """

    request_id: str
    created: int
    model: str
    fingerprint: str
    coder: TextCoder
    choices: list[ChoiceStream]
    n: int = 1
    client: str = ""
    is_chat: bool = True
    num_top: int | None = None
    streams: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    timings: bool = False
    return_token_ids: bool = False
    unconstrained: str = ""
    ignored: tuple[str, ...] = ()
    opened: set[int] = field(default_factory=set)
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the first fields of every body and chunk."""
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far. A prompt with several choices counts once."""
        prompt = sum(len(choice.request.prompt) for choice in self.choices[:: self.n])
        answer = sum(len(choice.tokens) for choice in self.choices)
        first = [choice.started for choice in self.choices[:: self.n]]
        cached = sum(started.num_cached for started in first if started is not None)
        reasoning = sum(choice.num_reasoning for choice in self.choices)
        images = [image for choice in self.choices[:: self.n] for image in choice.request.images]
        details = {"cached_tokens": cached}
        if images:
            details["image_tokens"] = sum(placed.image.num_tokens for placed in images)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def timing(self, index: int = 0) -> dict[str, Any]:
        """Return a choice's times under llama.cpp's names, with additional fields."""
        choice = self.choices[index]
        cached = choice.started.num_cached if choice.started is not None else 0
        done = choice.finished
        prompt_ms = 1e3 * done.prefill_s if done is not None else 0.0
        decode_ms = 1e3 * done.decode_s if done is not None else 0.0
        prompt_n, count = len(choice.request.prompt) - cached, len(choice.tokens)
        drafts = {"draft_n": choice.num_draft_tokens}
        drafts["draft_n_accepted"] = choice.num_accepted_tokens
        return {
            "cache_n": cached,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_second": _rate(prompt_n, prompt_ms),
            "predicted_n": count,
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": decode_ms / (count - 1) if count > 1 else 0.0,
            "predicted_per_second": _rate(count - 1, decode_ms),
            "queue_ms": 1e3 * choice.started.queue_s if choice.started is not None else 0.0,
            "preemptions": done.num_preemptions if done is not None else 0,
            "seed": choice.request.sampling.seed,
            **(drafts if choice.num_draft_tokens else {}),
        }

    def whole(self) -> dict[str, Any]:
        """Return the body for a response without streaming."""
        made = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        body = {**self.head(is_chunk=False), "choices": made, "usage": self.usage()}
        return {**body, "timings": self.timing()} if self.timings else body

    def _choice(self, index: int, choice: ChoiceStream) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index}
        if self.is_chat:
            content = None if choice.calls and not choice.content else choice.content
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if choice.reasoning:
                message["reasoning_content"] = message["reasoning"] = choice.reasoning
            if choice.calls:
                message["tool_calls"] = [_called(call) for call in choice.calls]
            body["message"] = message
        else:
            body["text"] = choice.echo + choice.content
        body["logprobs"] = self._logprobs(index, choice.scored)
        body["finish_reason"] = choice.finish_reason
        body["stop_reason"] = choice.stop_reason
        if self.return_token_ids:
            body["token_ids"] = choice.tokens
        return body

    def chunk(self, index: int, piece: AnswerDelta, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return a chunk with new text of a choice. The first chunk has the role."""
        is_first = index not in self.opened
        self.opened.add(index)
        body: dict[str, Any] = {"index": index}
        if self.is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
            if piece.content or (is_first and not piece.reasoning):
                delta["content"] = piece.content or (None if piece.calls else "")
            if piece.reasoning:
                delta["reasoning_content"] = delta["reasoning"] = piece.reasoning
            if piece.calls:
                delta["tool_calls"] = _call_deltas(piece.calls)
            body["delta"] = delta
        else:
            echo = self.choices[index].echo if is_first else ""
            body["text"] = echo + piece.content
        body["logprobs"] = self._logprobs(index, scored)
        body["finish_reason"] = None
        return self._chunk([body])

    def plain_chunk(self, index: int, text: str) -> bytes | None:
        """Return `chunk` as JSON for further content of a choice, from a cached frame.

        Return None for a chunk with other fields than text.
        """
        if index not in self.opened or self.num_top is not None or self.continuous_usage:
            return None
        frame = self._frames.get(index)
        if frame is None:
            whole = msgspec.json.encode(self.chunk(index, AnswerDelta(content=_MARK), ()))
            before, _, after = whole.partition(msgspec.json.encode(_MARK))
            frame = self._frames[index] = before, after
        return frame[0] + msgspec.json.encode(text) + frame[1]

    def last_chunk(self, index: int) -> dict[str, Any]:
        """Return a choice's last chunk: no text, and the finish reason."""
        choice = self.choices[index]
        text: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        body: dict[str, Any] = {"index": index, **text}
        body |= {"logprobs": None, "finish_reason": choice.finish_reason}
        body["stop_reason"] = choice.stop_reason
        if self.return_token_ids:
            body["token_ids"] = choice.tokens
        chunk = self._chunk([body])
        return {**chunk, "timings": self.timing(index)} if self.timings else chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk with usage after the last choice."""
        body = {**self.head(is_chunk=True), "choices": [], "usage": self.usage()}
        return {**body, "timings": self.timing()} if self.timings else body

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = {**self.head(is_chunk=True), "choices": choices}
        if self.continuous_usage:
            body["usage"] = self.usage()
        elif self.include_usage:
            body["usage"] = None
        return body

    def _logprobs(self, index: int, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if self.num_top is None:
            return None
        if self.is_chat:
            return chat_logprobs(self.coder, scored, self.num_top)
        offset = len(self.choices[index].echo)
        return legacy_logprobs(self.coder, scored, self.num_top, offset=offset)


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_deltas(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """Return the new part of each call. Clients join parts with the same index."""
    deltas: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        delta = deltas.setdefault(
            piece.index, {"index": piece.index, "function": {"arguments": ""}}
        )
        if piece.name:
            delta |= {"id": piece.id, "type": "function"}
            delta["function"] = {"name": piece.name, "arguments": ""}
        delta["function"]["arguments"] += piece.arguments
    return list(deltas.values())


def _rate(count: int, milliseconds: float) -> float:
    return 1e3 * count / milliseconds if milliseconds > 0 and count > 0 else 0.0
