"""Time and error of an engine in the cases of the generator. Times are medians over repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilewright.compiler.targets.cuda.engine_generator.cases import Trace, cases
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import error_of

HIDDEN_LIKE: dict[str, Any] = {
    "model_type": "tiny_llama",
    "torch_dtype": "float16",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""Configuration of the model whose speed has goals."""


def waits(device: torch.device) -> Callable[[], object]:
    """A function that returns when a device has ended its work."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else int


def errors_of(engine: Any, reference: Reference, *, scale: int, seed: int) -> dict[str, float]:
    """By case: the worst error in units of the tolerance, with ``seed``'s tokens."""
    found, device = {}, str(reference.device)
    for name, calls in cases(scale).items():
        trace = Trace(calls, reference.settings.vocab_size, device, seed)
        pairs = zip(trace.run(engine), trace.run(reference), strict=True)
        found[name] = max(error_of(ours, theirs) for ours, theirs in pairs)
        engine.remove(trace.requests)
        reference.remove(trace.requests)
    return found


def measure(
    engine: Any, reference: Reference, *, scale: int, repeats: int, only: str = ""
) -> dict[str, Any]:
    """By case: ``ms`` and ``tokens_per_s``, ``decode_tokens_per_s`` where it decodes, and the worst
    ``error`` in units of the tolerance. ``only``: the one case that is measured.
    """
    found = {}
    wait, device = waits(reference.device), str(reference.device)
    for name, calls in cases(scale).items():
        if only and name != only:
            continue
        trace = Trace(calls, reference.settings.vocab_size, device)
        ours = trace.run(engine)
        reference.tokens.clear()
        theirs = trace.run(reference)
        errors = [error_of(a, b) for a, b in zip(ours, theirs, strict=True)]
        engine.remove(trace.requests)
        seconds = [trace.seconds(engine, wait) for _ in range(repeats)]
        median = statistics.median(seconds)
        found[name] = {"ms": median * 1e3, "all_ms": [1e3 * s for s in seconds]}
        found[name] |= {"tokens_per_s": trace.num_tokens / median, "error": max(errors)}
        if trace.num_decoded:
            each = [trace.decode_seconds(engine, wait) for _ in range(repeats)]
            found[name]["decode_tokens_per_s"] = trace.num_decoded / statistics.median(each)
        engine.remove(trace.requests)
    return found
