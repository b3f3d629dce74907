"""Generation: schedule a step, launch it, collect its tokens; until every request has ended.

Where the executable allows it the next decode step is launched before the last one's tokens are
read, so that a device never waits for the host. What a step computes is the executable's matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilewright.compiler.errors import RequestError
from tilewright.compiler.runtime.batch import Piece, build_step, sampling_batch
from tilewright.compiler.runtime.request import CANCELLED, LENGTH, STOPPED, Request, check_tokens
from tilewright.compiler.runtime.scheduler import Scheduled, Scheduler
from tilewright.compiler.targets.base import Executable, StateHandle, StepInput, StepOutput

OnToken = Callable[[Request, int], None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way: its work, the requests that get a token from it, and the result.

    ``is_decode``: every request got one token from one token, so that the next step can follow.
    ``num_more``: how many steps can follow until one of its requests has all its tokens.
    """

    work: list[Scheduled]
    sampled: list[Request]
    inputs: StepInput
    output: StepOutput
    is_decode: bool = False
    num_more: int = 0


class LLM:
    """Runs requests on an executable, continuously batched. Token ids in, token ids out.

    At most one step is in flight, launched before the tokens that it works on were read. While it
    is, nobody is admitted, so all that run are in it, and no state is freed: the state of a
    request that ends is held until the flight has been read, so that its memory goes to nobody
    else while a step that chooses a token from it is queued. Tokens that a flight computed for
    requests which had ended are dropped; those of the others are kept.
    """

    def __init__(self, executable: Executable, *, prefill_chunk: int | None = None) -> None:
        self.executable = executable
        self.scheduler = Scheduler(
            executable.capabilities,
            reserve=self._reserve,
            release=self._release,
            num_free=executable.num_free,
            prefill_chunk=prefill_chunk,
        )
        self._last: _Launched | None = None
        self._flight: _Launched | None = None
        self._held: list[StateHandle] = []

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            RequestError: for a token outside the vocabulary, an empty prompt, or one that cannot
                fit the context with its output.
        """
        check_tokens(request.prompt, self.executable.vocab_size)
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request that :meth:`check` accepts.

        Raises:
            RequestError: for one that it refuses.
        """
        self.check(request)
        request.arrived_at = time.perf_counter()
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """One step; returns the requests that got a token, none where there is no work.

        Raises:
            RequestError: when requests wait and others hold all of the executable's state.
        """
        launched = self._flight
        if launched is None:
            if not self.scheduler.has_work():
                return []
            launched = self._launch(self._schedule())
        self._flight = self._launch_ahead(launched)
        served = self._collect(launched)
        self._land()
        return served

    def generate(self, requests: Iterable[Request], on_token: OnToken | None = None) -> None:
        """Run requests to their end, and those added before; ``on_token(request, token)`` hears
        every token. Whatever is raised, none of ``requests`` is left queued or running.

        Raises:
            RequestError: for a request that can never be served, before any of them is queued.
        """
        requests = tuple(requests)
        for request in requests:
            self.check(request)
        try:
            for request in requests:
                self.add(request)
            while self.scheduler.has_work():
                for request in self.step():
                    if on_token is not None:
                        on_token(request, request.output[-1])
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise

    def cancel(self, request: Request) -> None:
        """End a request early; its state is free once no step over it is in flight."""
        if request.finish_reason is None:
            request.finish_reason = CANCELLED
            self.scheduler.finish(request)
            self._land()

    def _schedule(self) -> list[Scheduled]:
        work = self.scheduler.schedule()
        if not work:
            raise RequestError("no sequence can be started: all of the state is held elsewhere")
        return work

    def _launch(self, work: list[Scheduled]) -> _Launched:
        requests = sampled = [item.request for item in work]
        inputs = self._following(requests)
        if inputs is None:
            inputs, sampled = self._build(work)
        output = self.executable.step(inputs)
        is_decode = len(sampled) == len(inputs.tokens)
        num_more = 0
        if is_decode:
            num_more = min(r.sampling.max_tokens - len(r.output) for r in sampled) - 1
        self._last = _Launched(work, sampled, inputs, output, is_decode, num_more)
        return self._last

    def _launch_ahead(self, last: _Launched) -> _Launched | None:
        """The decode step after ``last``, which has not been read; None where it is not certain
        to be wanted.
        """
        scheduler = self.scheduler
        if not (self.executable.capabilities.runs_ahead and last.num_more > 0):
            return None
        if last.sampled != scheduler.running or scheduler.can_admit():
            return None
        inputs = last.inputs.ahead(last.output)
        output = self.executable.step(inputs)
        self._last = _Launched(last.work, last.sampled, inputs, output, True, last.num_more - 1)
        return self._last

    def _following(self, requests: list[Request]) -> StepInput | None:
        """The next decode step of the same requests, made of the last one; None for any other."""
        last = self._last
        if last is None or not last.is_decode or last.sampled != requests:
            return None
        if self.executable.capabilities.runs_ahead:
            return last.inputs.ahead(last.output)
        assert last.output.token_ids is not None
        return last.inputs.following(last.output.token_ids)

    def _build(self, work: list[Scheduled]) -> tuple[StepInput, list[Request]]:
        """A step from the requests' own tokens, and those that it chooses one for."""
        pieces, sampled = [], []
        for item in work:
            request = item.request
            assert request.state is not None
            tokens = request.pending_tokens(item.num_tokens)
            complete = request.num_computed + len(tokens) == request.num_tokens
            pieces.append(Piece(request.state, tokens, request.num_computed, complete))
            if complete:
                sampled.append(request)
        sampling = sampling_batch(sampled) if sampled else None
        return build_step(pieces, sampling=sampling), sampled

    def _collect(self, launched: _Launched) -> list[Request]:
        """Take a step's tokens in; returns the requests that got one."""
        token_ids, finished = launched.output.read() if launched.sampled else ([], [])
        self._free_held()
        now = time.perf_counter()
        for item in launched.work:
            if item.request.finish_reason is None:
                item.request.num_computed += item.num_tokens
        served = []
        for request, token, ended in zip(launched.sampled, token_ids, finished, strict=True):
            if request.finish_reason is not None:
                continue
            served.append(request)
            request.output.append(token)
            request.token_times.append(now)
            if ended or len(request.output) == request.sampling.max_tokens:
                request.finish_reason = STOPPED if ended else LENGTH
                self.scheduler.finish(request)
        return served

    def _land(self) -> None:
        """Wait for a flight that nobody wants any more, and free what it held."""
        if self._flight is not None and not self.scheduler.running:
            self._flight.output.read()
            self._flight = None
            self._free_held()

    def _reserve(self, request: Request) -> None:
        request.state = self.executable.reserve(request.max_positions)

    def _release(self, request: Request) -> None:
        assert request.state is not None
        self._held.append(request.state)
        request.state = None
        if self._flight is None:
            self._free_held()

    def _free_held(self) -> None:
        for state in self._held:
            self.executable.free(state)
        self._held.clear()
