"""torch.compile of the reference with a cache of fixed size: what a careful user of torch writes.

A layer is compiled once for each shape, its weights given as arguments; a whole step is then
captured in a CUDA graph. Decode steps of up to eight requests have one shape, the rest of its rows
a seat that nobody has. ``python -m bench.engine.compiled '{...}'`` measures all cases, see `Asked`,
a line each: in a process of its own, which can be stopped.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.engine.measure import measure
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights

CASES = {
    "decode 8 x 32 + 16": False,
    "decode 8 x 128 + 16": False,
    "mixed": False,
    "prefill 4 x 128": True,
}
"""Whether prompts are compiled, too: where nothing else is, since each shape takes its time;
otherwise graphs are captured of what eager torch launches. The first three need one compilation
together, the last another.
"""

ROWS = 8
"""The rows of a compiled decode step: as many as the cases have requests at a time."""

EAGER = "eager"
"""The mode that traces, but compiles nothing: for tests."""

MODES = ("max-autotune-no-cudagraphs", "default", EAGER)
"""Modes of torch.compile without those that capture graphs, which `CompiledReference` does: the
first is max-autotune but for that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All cases of the model in ``config``, a file, with the weights in a folder."""

    config: str
    weights: str
    device: str
    mode: str
    scale: int
    repeats: int


def run(asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case and what `measure` finds of it, compiled; ``whole_s``: with compiling.

    Raises:
        ValueError: for a configuration or weights that cannot be read.
    """
    device = torch.device(asked.device)
    settings = read_settings(json.loads(Path(asked.config).read_text("utf-8")), device)
    reference = Reference(load_weights(asked.weights, settings), settings, device)
    engine = CompiledReference(reference, mode=asked.mode)
    for case, engine.prompts in CASES.items():
        begun = time.perf_counter()
        found = measure(engine, reference, scale=asked.scale, repeats=asked.repeats, only=case)
        yield case, {**found[case], "whole_s": round(time.perf_counter() - begun, 1)}


def command(asked: Asked) -> list[str]:
    """What follows the interpreter to measure all cases in a child."""
    return ["-m", "bench.engine.compiled", json.dumps(asdict(asked))]


class CompiledReference:
    """The reference's arithmetic in batches over a static cache, by ``mode`` of torch.compile;
    without ``prompts``, decode steps alone are compiled.

    Prompts of a call must have one length. The last seat is that of rows that are nobody's.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        num_seats: int = 16,
        length: int = 256,
        mode: str,
    ) -> None:
        self._reference, s = reference, reference.settings
        shape = s.num_layers, 2, num_seats, s.num_kv_heads, length, s.head_dim
        self._cache = torch.zeros(shape, dtype=s.dtype, device=reference.device)
        self._padding = num_seats - 1
        self._columns = torch.arange(length, device=reference.device)
        self._lengths: dict[int, int] = {}
        self._seats: dict[int, int] = {}
        self.prompts = True
        self._layers = [_weights_of(reference, f"layers.{i}.") for i in range(s.num_layers)]
        how: dict[str, Any] = {"backend": EAGER} if mode == EAGER else {"mode": mode}
        self._compiled = torch.compile(self._layer, fullgraph=True, dynamic=False, **how)
        self._graphs: dict[Any, tuple[Any, list[Tensor], Tensor]] = {}

    @torch.no_grad()
    def prefill(self, request_ids: Sequence[int], input_ids: Sequence[Tensor]) -> Tensor:
        for request in request_ids:
            used = set(self._seats.values())
            free = next(seat for seat in range(self._padding) if seat not in used)
            self._seats.setdefault(request, free)
            self._lengths[request] = 0
        return self._run(request_ids, torch.stack(list(input_ids)))

    @torch.no_grad()
    def decode(self, request_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        return self._run(request_ids, token_ids[:, None])

    def remove(self, request_ids: Sequence[int]) -> None:
        for request in request_ids:
            self._seats.pop(request, None)

    def _run(self, request_ids: Sequence[int], tokens: Tensor) -> Tensor:
        device, count = self._reference.device, len(request_ids)
        more = [0] * (ROWS - count) if tokens.shape[1] == 1 else []
        lengths = [self._lengths[request] for request in request_ids]
        taken = [self._seats[request] for request in request_ids]
        starts = torch.tensor([*lengths, *more]).to(device)
        seats = torch.tensor([*taken, *(self._padding for _ in more)]).to(device)
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=device)
        given = [F.pad(tokens.to(device), (0, 0, 0, len(more))), positions, seats]
        is_prompt = tokens.shape[1] > 1
        layer = self._layer if is_prompt and not self.prompts else self._compiled
        if device.type == "cuda":
            logits = self._replay(layer, given)
        else:
            logits = self._step(layer, *given)
        for request in request_ids:
            self._lengths[request] += tokens.shape[1]
        return logits[:count].clone()

    def _replay(self, layer: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
        """A step by the graph of its shape, captured when it is first asked for."""
        key = layer is self._compiled, given[0].shape
        if key not in self._graphs:
            held = [each.clone() for each in given]
            begun, what = time.perf_counter(), f"tokens {list(given[0].shape)}"
            print(f"{what}: being made", file=sys.stderr, flush=True)
            for _ in range(2):  # compiles; the cache is written as by the step itself
                self._step(layer, *held)
            torch.cuda.synchronize()
            took = time.perf_counter() - begun
            print(f"{what}: made in {took:.1f} s", file=sys.stderr, flush=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._step(layer, *held)
            self._graphs[key] = graph, held, logits
        graph, held, logits = self._graphs[key]
        for each, new in zip(held, given, strict=True):
            each.copy_(new)
        graph.replay()
        return logits

    def _step(
        self, layer: Callable[..., Tensor], tokens: Tensor, positions: Tensor, seats: Tensor
    ) -> Tensor:
        """Tokens and positions ``[B, T]`` of the sequences in ``seats [B]``: logits ``[B, V]``."""
        reference = self._reference
        turns = reference.turns[positions].unsqueeze(1)
        seen = self._columns[None, None, None, :] <= positions[:, None, :, None]
        x = F.embedding(tokens, reference.tensors["embed_tokens.weight"])
        for weights, cache in zip(self._layers, self._cache, strict=True):
            x = layer(x, turns, seen, positions, seats, cache[0], cache[1], weights)
        last = _norm(x[:, -1], reference.tensors["norm.weight"], reference.settings.eps)
        return F.linear(last, reference.tensors["lm_head.weight"])

    def _layer(
        self,
        x: Tensor,
        turns: Tensor,
        seen: Tensor,
        positions: Tensor,
        seats: Tensor,
        keys: Tensor,
        values: Tensor,
        weights: dict[str, Tensor],
    ) -> Tensor:
        s = self._reference.settings
        normed = _norm(x, weights["input_layernorm"], s.eps)
        q, k, v = (
            F.linear(normed, weights[f"self_attn.{name}_proj"])
            .unflatten(-1, (-1, s.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        q, k = _rotate(q, turns, s.interleaved), _rotate(k, turns, s.interleaved)
        keys[seats[:, None], :, positions] = k.transpose(1, 2)
        values[seats[:, None], :, positions] = v.transpose(1, 2)
        heads = F.scaled_dot_product_attention(
            q, keys[seats], values[seats], attn_mask=seen, enable_gqa=True
        )
        x = x + F.linear(heads.transpose(1, 2).flatten(2), weights["self_attn.o_proj"])
        normed = _norm(x, weights["post_attention_layernorm"], s.eps)
        gate, up = (F.linear(normed, weights[f"mlp.{name}_proj"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, weights["mlp.down_proj"])


def _weights_of(reference: Reference, at: str) -> dict[str, Tensor]:
    found = reference.tensors.items()
    return {n.removeprefix(at).removesuffix(".weight"): t for n, t in found if n.startswith(at)}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
    cos, sin = turns.chunk(2, dim=-1)
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # the last line on standard error says where
        for named in run(Asked(**json.loads(sys.argv[1]))):
            print(json.dumps(named), flush=True)
