"""Items and events of a response, made while the answer arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tilewright.serve.output.choice import LENGTH, Scored, chat_logprobs
from tilewright.serve.output.reasoning import AnswerDelta, CallPiece
from tilewright.serve.responses.items import Item, new_id
from tilewright.serve.responses.request import ResponsesRequest
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.responses import CompletionTask

Updates = Mapping[int, tuple[AnswerDelta, list[Scored]]]
_REASONING, _MESSAGE, _CALL = "reasoning", "message", "function_call"


class ResponseSpelling:
    """A response and its events.

    Text, reasoning and calls become items in their order. White space does not begin a text.

    Attributes:
        id: The response's id.
        output: Items so far.
    """

    def __init__(
        self,
        job: CompletionTask,
        request: ResponsesRequest,
        *,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        """``on_end``: Takes the finished response."""
        self.id = new_id("resp")
        self.output: list[Item] = []
        self._job, self._request, self._on_end = job, request, on_end
        self._number = 0
        self._open: tuple[str, int] | None = None
        self._space = ""
        self._status = "in_progress"

    def chunks(self, updates: Updates) -> bytes:
        """Return the events of new output. A stream begins with two events of the response."""
        return b"".join(map(self._event, self._begin() + self.take(updates)))

    def tail(self) -> bytes:
        """Return a stream's last events."""
        return b"".join(map(self._event, self._begin() + self.finish()))

    def fault(self, error: ApiError) -> bytes:
        """Return a failed stream's last event."""
        self._status = "failed"
        body = self.whole()
        body["error"] = {"code": "server_error", "message": error.message}
        events = [*self._begin(), {"type": "response.failed", "response": body}]
        return b"".join(map(self._event, events))

    def take(self, found: Updates) -> list[dict[str, Any]]:
        """Add new output. Return its events."""
        events: list[dict[str, Any]] = []
        for piece, scored in found.values():
            if piece.reasoning:
                events += self._text(_REASONING, piece.reasoning, ())
            if piece.content:
                events += self._say(piece.content, scored)
            for call in piece.calls:
                events += self._call(call)
        return events

    def finish(self) -> list[dict[str, Any]]:
        """End the response. Return the last events."""
        choice = self._job.choices[0]
        events = []
        if not self.output:
            events += self._turn((_MESSAGE, 0))
            if self._space:
                events += self._text(_MESSAGE, self._space, ())
        self._status = "incomplete" if choice.finish_reason == LENGTH else "completed"
        events += self._close()
        body = self.whole()
        self._on_end(body)
        return [*events, {"type": f"response.{self._status}", "response": body}]

    def whole(self) -> dict[str, Any]:
        """Return the current response."""
        job, request = self._job, self._request
        reasoning, sampling = request.reasoning, job.choices[0].request.sampling
        is_over = self._status in ("completed", "incomplete")
        is_cut = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": job.created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": job.model,
            "output": self.output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": None,
            },
            "service_tier": "default",
            "store": request.is_stored,
            "system_fingerprint": job.fingerprint,
            "temperature": sampling.temperature,
            "text": {"format": _format_of(request)},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": _usage(job) if is_over else None,
            "user": request.user,
        }

    def _begin(self) -> list[dict[str, Any]]:
        if self._number:
            return []
        kinds = ("response.created", "response.in_progress")
        body = {**self.whole(), "status": "in_progress", "output": []}
        return [{"type": kind, "response": body} for kind in kinds]

    def _event(self, event: dict[str, Any]) -> bytes:
        kind = event["type"].encode()
        body = msgspec.json.encode({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: " + kind + b"\ndata: " + body + b"\n\n"

    def _say(self, content: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        if self._open != (_MESSAGE, 0):
            content, self._space = self._space + content, ""
            if not content.strip():
                self._space = content
                return []
        return self._text(_MESSAGE, content, scored)

    def _text(self, kind: str, text: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        """Add text to the open item, or to a new item if the kind differs."""
        events = self._turn((kind, 0))
        part, delta = self.output[-1]["content"][0], {"delta": text}
        part["text"] += text
        if kind == _MESSAGE:
            logprobs = self._logprobs(scored)
            part["logprobs"] += logprobs
            delta["logprobs"] = logprobs  # type: ignore[assignment]
        name = "output_text" if kind == _MESSAGE else "reasoning_text"
        return [*events, {"type": f"response.{name}.delta", **self._place(), **delta}]

    def _call(self, piece: CallPiece) -> list[dict[str, Any]]:
        events = self._turn((_CALL, piece.index), piece)
        item = self.output[-1]
        item["arguments"] += piece.arguments
        if piece.arguments:
            kind = "response.function_call_arguments.delta"
            place = self._place(has_parts=False)
            events.append({"type": kind, **place, "delta": piece.arguments})
        return events

    def _turn(self, to: tuple[str, int], call: CallPiece | None = None) -> list[dict[str, Any]]:
        """Close the open item and open ``to``. Return the events."""
        if self._open == to:
            return []
        events, kind = self._close(), to[0]
        self._open = to
        item: Item = {"type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"id": new_id("fc"), "call_id": call.id, "name": call.name, "arguments": ""}
        elif kind == _MESSAGE:
            item |= {"id": new_id("msg"), "role": "assistant", "content": []}
        else:
            item |= {"id": new_id("rs"), "summary": [], "content": []}
        self.output.append(item)
        at = {"output_index": len(self.output) - 1}
        events.append({"type": "response.output_item.added", **at, "item": {**item}})
        if call is None:
            part = _part(kind)
            item["content"] = [part]
            added = {"type": "response.content_part.added", **self._place(), "part": {**part}}
            events.append(added)
        return events

    def _close(self) -> list[dict[str, Any]]:
        """Close the open item, if any."""
        if self._open is None:
            return []
        kind, item = self._open[0], self.output[-1]
        self._open = None
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        events: list[dict[str, Any]] = []
        if kind == _CALL:
            done = {"name": item["name"], "arguments": item["arguments"]}
            place = self._place(has_parts=False)
            events.append({"type": "response.function_call_arguments.done", **place, **done})
        else:
            part, place = item["content"][0], self._place()
            name = "output_text" if kind == _MESSAGE else "reasoning_text"
            text = {key: part[key] for key in ("text", "logprobs") if key in part}
            events.append({"type": f"response.{name}.done", **place, **text})
            events.append({"type": "response.content_part.done", **place, "part": part})
        at = {"output_index": len(self.output) - 1}
        return [*events, {"type": "response.output_item.done", **at, "item": item}]

    def _place(self, *, has_parts: bool = True) -> dict[str, Any]:
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return {**place, "content_index": 0} if has_parts else place

    def _logprobs(self, scored: Sequence[Scored]) -> list[Any]:
        job = self._job
        if job.num_top is None or not scored:
            return []
        logprobs = chat_logprobs(job.coder, scored, job.num_top)["content"]
        assert isinstance(logprobs, list)
        return logprobs


def _part(kind: str) -> dict[str, Any]:
    if kind == _REASONING:
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _format_of(request: ResponsesRequest) -> dict[str, Any]:
    text_format = request.text.format if request.text is not None else None
    if text_format is None or text_format.type != "json_schema":
        return {"type": text_format.type if text_format is not None else "text"}
    named = {
        "name": text_format.name,
        "description": text_format.description,
        "strict": text_format.strict,
    }
    return {"type": text_format.type, **named, "schema": text_format.schema}


def _usage(job: CompletionTask) -> dict[str, Any]:
    counts = job.usage()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
