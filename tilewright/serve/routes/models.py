"""Routes for the served model, its limits and its tokenizer."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tilewright.runtime.messages import EngineReady
from tilewright.serve.api_server import ApiServer
from tilewright.serve.output.choice import token_text
from tilewright.serve.responses.store import MAX_STORED, MAX_STORED_BYTES
from tilewright.serve.routes.embeddings import MAX_INPUTS
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.http_io import API_SERVER, Route, json_response
from tilewright.serve.web.requests import MAX_PROMPTS, MAX_STOPS

_FACTS = ("parameters", "precision", "target", "weights", "device")
_PROMISES = {
    "rows": "the same request, seed and fingerprint have the same tokens, whatever runs beside",
    "batch": "the same, where its prompt was cut into the same cells",
    "small": "the same request, seed and fingerprint have the same tokens while at most {} "
    "requests run or wait; beside more, tokens are the same up to rounding",
    "none": "tokens are the same up to rounding: where a prompt is cut depends on measured times",
}


async def _models(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    ready, _ = front.up()
    return json_response(
        {"object": "list", "data": [_card(front, name) for name in front.names(ready)]}
    )


async def _model(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    ready, _ = front.up()
    name = request.match_info["id"]
    if name not in front.names(ready):
        known = ", ".join(front.names(ready))
        said = f"model {name[:100]!r}; allowed: {known}"
        raise ApiError(404, "model_not_found", said, param="model")
    return json_response(_card(front, name))


def _card(front: ApiServer, name: str) -> dict[str, Any]:
    ready, _ = front.up()
    facts: dict[str, Any] = {key: ready.facts.get(key) for key in _FACTS}
    facts["precision"] = ready.facts.get("configuration", facts["precision"])
    if facts["parameters"] is not None:
        facts["parameters"] = int(facts["parameters"])
    facts["modalities"] = _modalities(ready)
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "tilewright",
        "root": ready.facts.get("name"),
        "max_model_len": ready.max_positions,
        "meta": facts,
    }


def _image_limits(front: ApiServer) -> dict[str, int]:
    limits = front.settings.limit_mm_per_prompt
    return {
        "max_images": limits.max_images,
        "max_image_bytes": limits.max_bytes,
        "max_image_pixels": limits.max_pixels,
    }


def _modalities(ready: EngineReady) -> list[str]:
    return ["text"] if ready.images is None else ["text", "image"]


async def _props(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    ready, coder = front.up()
    defaults = {"temperature": 0.0, "top_p": 1.0, **front.defaults}
    return json_response(
        {
            "model": front.names(ready)[0],
            "system_fingerprint": front.fingerprint,
            "total_slots": ready.max_num_seqs,
            "replicas": len(front.client.engines),
            "max_model_len": ready.max_positions,
            "num_pages": ready.num_pages,
            "page_size": ready.page_size,
            "num_snapshots": ready.num_snapshots,
            "cell": ready.cell,
            "arithmetic": ready.facts.get("arithmetic"),
            "invariant": ready.invariant,
            "invariant_requests": ready.invariant_rows or None,
            "determinism": _determinism(ready),
            "speculative_config": ready.speculation,
            "facts": ready.facts,
            "chat_template": coder.chat_template,
            "chat_template_reads": {
                "tools": front.template.reads_tools,
                "tool_calls": front.template.writes_calls,
                "variables": front.template.variables,
            },
            "tool_format": front.template.calls.name if coder.chat_template else None,
            "tool_format_from": _format_source(front),
            "template_variables": dict(front.settings.template_variables),
            "default_generation_settings": defaults,
            "pooling": front.settings.pooling,
            "embedding_size": ready.hidden_size,
            "modalities": _modalities(ready),
            "limits": {
                "max_body": front.max_body,
                **_image_limits(front),
                "max_queue": front.settings.max_queue,
                "queue_timeout": front.settings.queue_timeout,
                "max_connections": front.settings.max_connections,
                "max_stops": MAX_STOPS,
                "max_prompts": MAX_PROMPTS,
                "max_inputs": MAX_INPUTS,
                "max_stored_responses": MAX_STORED,
                "max_stored_bytes": MAX_STORED_BYTES,
            },
        }
    )


def _format_source(front: ApiServer) -> str:
    """Return the source of the tool call format."""
    if front.settings.tool_format is not None:
        return "option"
    return "generic" if front.template.format is None else "template"


def _determinism(ready: EngineReady) -> str:
    if ready.invariant_rows:
        return _PROMISES["small"].format(ready.invariant_rows)
    return _PROMISES[ready.invariant]


async def _tokenizer_info(request: web.Request) -> web.Response:
    _, coder = request.app[API_SERVER].up()
    ends = [token_text(coder, token) for token in coder.eos_ids]
    return json_response(
        {
            "eos_token": ends[0] if ends else None,
            "eos_token_ids": coder.eos_ids,
            "bos_token": None if coder.bos_id is None else token_text(coder, coder.bos_id),
            "vocab_size": coder.vocab_size,
            "chat_template": coder.chat_template,
        }
    )


ROUTES: list[Route] = [
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{id:.+}", _model),
    ("GET", "/props", _props),
    ("GET", "/tokenizer_info", _tokenizer_info),
]
