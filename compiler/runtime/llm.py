"""Generation: schedule, run, take the tokens in; until every request has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from compiler.errors import RequestError
from compiler.runtime.batch import Piece, build_step, sampling_batch
from compiler.runtime.request import CANCELLED, LENGTH, STOPPED, Request, check_tokens
from compiler.runtime.scheduler import PREFILL_CHUNK, Scheduled, Scheduler
from compiler.targets.base import Executable, StepInput, StepOutput

OnToken = Callable[[Request, int], None]


@dataclass(frozen=True, slots=True)
class _Decode:
    """A step in which every request got one token from one token: the next may follow from it."""

    requests: list[Request]
    inputs: StepInput
    token_ids: Tensor


class LLM:
    """Runs requests on an executable, continuously batched. Token ids in, token ids out."""

    def __init__(self, executable: Executable, *, prefill_chunk: int = PREFILL_CHUNK) -> None:
        self.executable = executable
        self.scheduler = Scheduler(
            executable.capabilities,
            reserve=self._reserve,
            release=self._release,
            num_free=executable.num_free,
            prefill_chunk=prefill_chunk,
        )
        self._last: _Decode | None = None

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError where it can never be served."""
        check_tokens(request.prompt, self.executable.vocab_size)
        request.arrived_at = time.perf_counter()
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """One step; returns the requests that got a token.

        Raises:
            RequestError: when requests wait and others hold all of the executable's state.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            raise RequestError("no sequence can be started: all of the state is held elsewhere")
        output, sampled = self._run(scheduled)
        return self._take_tokens(output, sampled)

    def generate(self, requests: Iterable[Request], on_token: OnToken | None = None) -> None:
        """Run requests to their end; ``on_token(request, token)`` hears every token."""
        for request in requests:
            self.add(request)
        while self.scheduler.has_work():
            for request in self.step():
                if on_token is not None:
                    on_token(request, request.output[-1])

    def cancel(self, request: Request) -> None:
        """End a request early and free its state."""
        if request.finish_reason is None:
            request.finish_reason = CANCELLED
            self.scheduler.finish(request)

    def _run(self, scheduled: list[Scheduled]) -> tuple[StepOutput, list[Request]]:
        requests = sampled = [item.request for item in scheduled]
        inputs = self._following(requests)
        if inputs is None:
            inputs, sampled = self._build(scheduled)
        for item in scheduled:
            item.request.num_computed += item.num_tokens
        output = self.executable.step(inputs)
        self._last = None
        if output.token_ids is not None and len(sampled) == len(inputs.tokens):
            self._last = _Decode(requests, inputs, output.token_ids)
        return output, sampled

    def _following(self, requests: list[Request]) -> StepInput | None:
        """The next decode step of the same requests, made of the last one; None for any other."""
        last = self._last
        if last is None or len(last.requests) != len(requests):
            return None
        if any(one is not other for one, other in zip(last.requests, requests, strict=True)):
            return None
        return last.inputs.following(last.token_ids)

    def _build(self, scheduled: list[Scheduled]) -> tuple[StepInput, list[Request]]:
        """A step from the requests' own tokens, and those that it chooses one for."""
        pieces, sampled = [], []
        for item in scheduled:
            request = item.request
            assert request.state is not None
            tokens = request.pending_tokens(item.num_tokens)
            complete = request.num_computed + len(tokens) == request.num_tokens
            pieces.append(Piece(request.state, tokens, request.num_computed, complete))
            if complete:
                sampled.append(request)
        sampling = sampling_batch(sampled) if sampled else None
        return build_step(pieces, sampling=sampling), sampled

    def _take_tokens(self, output: StepOutput, sampled: list[Request]) -> list[Request]:
        if not sampled:
            return []
        assert output.token_ids is not None and output.finished is not None
        now = time.perf_counter()
        rows = zip(sampled, output.token_ids.tolist(), output.finished.tolist(), strict=True)
        for request, token, finished in rows:
            request.output.append(token)
            request.token_times.append(now)
            if finished or len(request.output) == request.sampling.max_tokens:
                request.finish_reason = STOPPED if finished else LENGTH
                self.scheduler.finish(request)
        return sampled

    def _reserve(self, request: Request) -> None:
        request.state = self.executable.reserve(request.max_positions)

    def _release(self, request: Request) -> None:
        assert request.state is not None
        self.executable.free(request.state)
        request.state = None
