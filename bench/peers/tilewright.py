"""Tilewright as an engine of a comparison: an executable, run as ``tilewright run`` runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.peers.protocol import Generated, Loaded
from tilewright.compiler.driver import Compiled
from tilewright.compiler.ir.cost import step_costs
from tilewright.compiler.runtime.llm import LLM
from tilewright.compiler.runtime.request import Request, SamplingParams


class Tilewright:
    """A compiled model."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled

    def loaded(self) -> Loaded:
        """The weights as the target holds them; a step reads them in their formats' own size."""
        costs = step_costs(self._compiled.graph(), num_tokens=1, context=1)
        step_bytes = sum(cost.weight_bytes for cost in costs)
        return Loaded(self._compiled.executable.memory().weights, step_bytes)

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """See `Engine.generate`."""
        request = Request(0, tuple(tokens), SamplingParams(max_tokens=num_tokens))
        started = time.perf_counter()
        LLM(self._compiled.executable).generate([request])
        times = tuple(at - started for at in request.token_times)
        return Generated(tuple(request.output), times)
