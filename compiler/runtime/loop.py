"""The loop: schedule, launch, read; requests in, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilewright.compiler.runtime.request import FAILED, Request, check_tokens
from tilewright.compiler.runtime.scheduler import Plan, Policy, Scheduler
from tilewright.compiler.targets.base import Executable
from tilewright.compiler.targets.step import NOT_A_NUMBER, StepOutput

OnToken = Callable[[Request, int], None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way."""

    plan: Plan
    output: StepOutput


class EngineLoop:
    """Runs requests on an executable, continuously batched. Token ids in, token ids out.

    It owns the executable's seats and pages from the beginning, when it clears them. Where the
    executable runs ahead, a step is launched before the tokens of the last one are read; tokens
    computed for requests that had ended meanwhile are dropped and counted.
    """

    def __init__(self, executable: Executable, *, policy: Policy | None = None) -> None:
        self.executable = executable
        executable.reset()
        self.scheduler = Scheduler(executable.capabilities, policy=policy, cost=executable.cost)
        self.num_dropped = 0
        self._flight: _Launched | None = None

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

    def has_work(self) -> bool:
        """Whether any request waits or runs, or a step is on its way."""
        return self.scheduler.has_work() or self._flight is not None

    def step(self) -> list[Request]:
        """Launch what can be launched, read one step; returns the requests that got a token.

        Without work it does nothing.
        """
        launched = self._flight or self._launch()
        self._flight = None
        if launched is None:
            return []
        if self.executable.capabilities.runs_ahead:
            try:
                self._flight = self._launch()
            except BaseException:
                self._flight = launched  # it was launched all the same, and is read later
                raise
        served = self._read(launched)
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
            while self.has_work():
                for request in self.step():
                    if on_token is not None:
                        on_token(request, request.output[-1])
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise

    def cancel(self, request: Request) -> None:
        """End a request early; what is on its way for it is dropped."""
        self.scheduler.cancel(request)
        self._land()

    def _land(self) -> None:
        """Wait for a flight that nobody wants any more, and free what it held."""
        if self._flight is not None and not self.scheduler.running:
            flight, self._flight = self._flight, None
            self._read(flight)
        closing = self.scheduler.closing()
        if closing is not None:
            self.executable.step(closing)

    def _launch(self) -> _Launched | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        try:
            return _Launched(plan, self.executable.step(plan.step))
        except BaseException:
            # what was edited and computed is not known: all of it is done again, if anybody asks
            self.scheduler.evacuate()
            self.executable.reset()
            raise

    def _read(self, launched: _Launched) -> list[Request]:
        served = []
        for part in launched.output.parts:
            chosen = part.read()
            now = time.perf_counter()
            for index, seat in enumerate(part.seats):
                running = launched.plan.rows.get(seat)
                if running is None:
                    continue
                request = running.request
                if chosen.why[index] == NOT_A_NUMBER:
                    request.error = "the model's logits are no numbers"
                    self.scheduler.finish(request, FAILED)
                    continue
                is_end = chosen.why[index] != 0
                if not self.scheduler.take(running, chosen.tokens[index], is_end=is_end):
                    self.num_dropped += 1
                    continue
                request.token_times.append(now)
                if chosen.logprobs is not None and request.sampling.logprobs is not None:
                    request.logprobs.append(chosen.logprobs[index])
                served.append(request)
        return served
