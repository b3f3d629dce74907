"""The engine loop: schedules, launches and reads steps. Requests in, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    GOES_ON,
    NOT_A_NUMBER,
    Pooled,
    SampledTokens,
    Slot,
    StepOutput,
)
from tilewright.errors import RequestError, one_line
from tilewright.runtime.grammar.masks import Masks, no_token
from tilewright.runtime.grammar.matchers import Grammars
from tilewright.runtime.request import FAILED, STOPPED, check_tokens
from tilewright.runtime.scheduling.engine_stats import HOST, IDLE, SIZE, STEP, EngineStats
from tilewright.runtime.scheduling.request_state import (
    RequestState,
    SchedulerConfig,
    SchedulerOutput,
)
from tilewright.runtime.scheduling.scheduler import Scheduler
from tilewright.runtime.scheduling.step_cost_model import StepCostModel, StepTimer
from tilewright.runtime.speculative.config import MTP
from tilewright.runtime.speculative.draft_layer import DraftLayerClient
from tilewright.runtime.speculative.draft_model import DraftModel

OnToken = Callable[[RequestState, int], None]

_LONG = 4
"""Cells of the longest prompt in the warm-up, if steps are short.

A linear fit through less would promise too much for larger chunks.
"""
_STREAMS, _STREAMED, _BESIDE = 32, 48, 32
"""Requests, tokens per request, and cells of the prompt for the measurement of mixed batches."""
_MIN_ROWS_TOGETHER = 8
"""Minimum rows of a step whose tokens are taken together."""
_DRAFTED = 4
"""Number of measured steps with drafts in the warm-up."""


class LostDeviceError(Exception):
    """A launched step cannot be read. The device's state is unknown."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step in flight, and its launch time."""

    plan: SchedulerOutput
    output: StepOutput
    at: float


class EngineLoop:
    """Runs requests on an executable with continuous batching. Token ids in, token ids out.

    The loop owns the executable's slots and pages, and clears them at the start. With asynchronous
    scheduling, it launches a step before it reads the previous step. Tokens of requests that
    finished meanwhile are dropped and counted.

    A request with a grammar waits for its matcher before it is queued. Its rows use deferred
    sampling: the masks need the previous tokens, and are computed during the forward pass.

    Attributes:
        failed: requests of a step that failed to launch, newest prompt first.
        stats: times of steps and their parts.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        policy: SchedulerConfig | None = None,
        grammars: Grammars | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """Set up a loop.

        Args:
            grammars: Compiles for the tokenizer. None: no grammars.
            draft_model: Proposes drafts. None: n-grams or the draft layer do.
        """
        speculative = None if policy is None else policy.speculative
        has_layer = speculative is not None and speculative.method == MTP
        self._draft_model = DraftLayerClient(executable) if has_layer else draft_model
        if draft_model is not None:
            draft_model.limit_tokens(executable.num_choosable)
        self.executable = executable
        self.masks = Masks(grammars)
        executable.reset()
        self.cost = StepCostModel()
        self._meter, self._num_captures = StepTimer(self.cost), 0
        self.scheduler = Scheduler(
            executable.capabilities,
            policy=policy,
            cost=self.cost,
            state_bytes=executable.state_bytes,
            cross_key_bytes=executable.cross_key_bytes,
            draft_model=self._draft_model,
        )
        self.num_dropped = 0
        self.failed: tuple[RequestState, ...] = ()
        self.stats = EngineStats()
        self._read_at: float | None = None
        self._flight: _StepInFlight | None = None

    def check(self, request: RequestState) -> None:
        """Check that a request can be served.

        Raises:
            RequestError: for a token outside the vocabulary, an empty prompt, or a prompt that does
                not fit the context with its output.
        """
        ignored = request.image_tokens
        tokens = [token for token in request.prompt if token not in ignored]
        check_tokens(tokens if ignored else request.prompt, self.executable.vocab_size)
        if request.images and self.executable.encoder is None:
            raise RequestError("images: this model and target take text only; allowed: text")
        if request.grammar is not None:
            self.masks.check()
        self.scheduler.check(request)

    def add(self, request: RequestState) -> None:
        """Check and queue a request.

        Raises:
            RequestError: see `check`.
        """
        self.check(request)
        self._queue(request)

    def _queue(self, request: RequestState) -> None:
        request.arrived_at = time.perf_counter()
        if request.grammar is None:
            self.scheduler.add(request)
        else:
            self.masks.compile(request)

    def has_work(self) -> bool:
        """Return whether a request waits or runs, or a step is in flight."""
        return self._runs() or bool(self.masks.compiling)

    def _runs(self) -> bool:
        return self.scheduler.has_work() or self._flight is not None

    def step(self) -> list[RequestState]:
        """Launch a step if possible, and read a step. Return the requests with new tokens.

        Do nothing without work.
        """
        self._queue_compiled()
        launched = self._flight or self._launch()
        self._flight = None
        if launched is None:
            self._read_at = None
            return []
        if self.executable.capabilities.runs_ahead:
            try:
                self._flight = self._launch(behind=launched)
            except BaseException:
                self._flight = launched  # it is launched, and is read later
                raise
        served = self._read(launched)
        if self._flight is not None and self._flight.plan.step.masked:
            self._choose_in_flight(self._flight)
        self._land()
        return served

    def generate(self, requests: Iterable[RequestState], on_token: OnToken | None = None) -> None:
        """Run requests, and all earlier ones, to their end.

        After an exception, none of ``requests`` is queued or running.

        Args:
            requests: requests to run.
            on_token: receives a request and a token, for every token.

        Raises:
            RequestError: for an invalid request, before any is queued.
        """
        requests = tuple(requests)
        for request in requests:
            self.check(request)
        try:
            for request in requests:
                self._queue(request)
            while self.has_work():
                for request in self.step():
                    num_heard, request.num_sent = request.num_sent, len(request.output)
                    if on_token is not None:
                        for token in request.output[num_heard:]:
                            on_token(request, token)
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise

    def warm_up(self) -> None:
        """Run the first steps and measure step times, before users wait.

        Every measurement runs twice, because a first run is slower. The statistics exclude the
        warm-up.
        """
        self.executable.prepare()
        if self._draft_model is not None:
            self._draft_model.prepare()
        limits = self.executable.capabilities
        sampling = SamplingParams(max_tokens=min(3, limits.max_context))
        most = limits.max_context - sampling.max_tokens + 1
        cells = (1, limits.cell, _LONG * limits.cell) if limits.runs_ahead else (1, limits.cell)
        lengths = sorted({min(length, most) for length in cells})
        for _ in range(2):
            self.cost.forget()
            for length in lengths:
                self.generate([RequestState(-1, (0,) * length, sampling, is_private=True)])
            self._run_with_drafts()
            self._measure_mixed_batches()
        self.stats.found.clear()
        self.scheduler.speculator.forget()

    def _run_with_drafts(self) -> None:
        """Measure decode rows with drafts. Most drafts are wrong."""
        speculator, limits = self.scheduler.speculator, self.executable.capabilities
        num_wanted = _DRAFTED * speculator.max_drafts
        if not num_wanted:
            return
        num_tokens = min(1 + _DRAFTED * (1 + speculator.max_drafts), limits.max_context)
        speculator.is_warming_up = True
        sampling = SamplingParams(max_tokens=num_tokens)
        request = RequestState(-1, (0,), sampling, is_private=True)
        self.add(request)
        while (
            request.finish_reason is None
            and request.num_draft_tokens < _DRAFTED * speculator.max_drafts
        ):
            self.step()
        self.cancel(request)
        speculator.is_warming_up = False

    def _measure_mixed_batches(self) -> None:
        """Run a prompt while other requests decode. Drafts would decode in steps of their own."""
        limits = self.executable.capabilities
        if not limits.passes or limits.max_num_seqs == 1:
            return
        sampling = SamplingParams(max_tokens=min(_STREAMED, limits.max_context))
        last = SamplingParams(max_tokens=1)
        length = min(_BESIDE * limits.cell, limits.max_context - 1)
        states = partial(RequestState, -1, is_private=True, has_drafts=False)
        streams = [states((0,), sampling) for _ in range(min(_STREAMS, limits.max_num_seqs - 1))]
        try:
            for request in streams:
                self.add(request)
            while self.scheduler.line or any(request.prompt_left for request in streams):
                self.step()
            self.generate([states((0,) * length, last)])
        finally:
            for request in streams:
                self.cancel(request)

    def cancel(self, request: RequestState) -> None:
        """Cancel a request. Its tokens in flight are dropped."""
        self.masks.forget(request)
        self.scheduler.cancel(request)
        self._land()

    def _queue_compiled(self) -> None:
        """Queue the requests with finished matchers."""
        if not self.masks.compiling:
            return
        for request, error in self.masks.compiled(waits=not self._runs()):
            if error:
                self._fail(request, error)
            else:
                self.scheduler.add(request)

    def _fail(self, request: RequestState, error: str, code: str = "engine_error") -> None:
        if request.finish_reason is None:
            request.error, request.error_code = error, code
            self.scheduler.finish(request, FAILED)

    def _land(self) -> None:
        """Read a step in flight without running requests, and free its slots."""
        if self._flight is not None and not self.scheduler.cache_manager.running:
            flight, self._flight = self._flight, None
            self._read(flight)
        closing = self.scheduler.closing()
        if closing is not None:
            self.executable.step(closing)

    def _launch(self, behind: _StepInFlight | None = None) -> _StepInFlight | None:
        """Launch the next step. With ``behind``, the previous step is unread.

        Without ``behind``, the masked rows are sampled at once.
        """
        began, speculator = time.perf_counter(), self.scheduler.speculator
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        now = time.perf_counter()
        self.stats.add(HOST, now - began, "schedule")
        if speculator.max_drafts:
            self.stats.add(HOST, speculator.seconds, "drafts")
        if behind is None:
            self._meter.begin(began if plan.step.drafts else now)
            if self._read_at is not None:
                self.stats.add(IDLE, now - self._read_at)
        masked = plan.step.masked and behind is None
        try:
            if masked:
                self.masks.begin(plan.rows)
            launched = _StepInFlight(plan, self.executable.step(plan.step), now)
            self.stats.add(HOST, time.perf_counter() - now, "launch")
            if masked:
                self._choose(launched)
            return launched
        except BaseException:
            self.failed = _to_blame(plan, self.scheduler.running)
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Reset an executable in an unknown state. Requests are computed again."""
        self.scheduler.evacuate()
        self.executable.reset()

    def _choose_in_flight(self, flight: _StepInFlight) -> None:
        """Compute a step's masks in flight after its previous tokens are read."""
        rows = flight.plan.rows.items()
        self.masks.begin({slot: state for slot, state in rows if state.finish_reason is None})
        try:
            self._choose(flight)
        except BaseException:
            self._flight = None
            self.failed = _to_blame(flight.plan, self.scheduler.running)
            self._abandon()
            raise

    def _choose(self, launched: _StepInFlight) -> None:
        """Sample a masked step's tokens. Finish the requests without an allowed token."""
        began = time.perf_counter()
        allowed, over = self.masks.take()
        self.stats.add(HOST, time.perf_counter() - began, "masks")
        for request in over:
            if request.matcher is not None and request.matcher.is_finished:
                self.scheduler.finish(request, STOPPED)  # complete, but without an end token
            else:
                self._fail(request, no_token(request))
        self.executable.choose(launched.output, allowed)

    def _read(self, launched: _StepInFlight) -> list[RequestState]:
        served: list[RequestState] = []
        plan, parts = launched.plan, launched.output.parts
        handling, echoes = 0.0, iter(plan.echoes)
        for part in parts:
            try:
                chosen = part.read()
            except Exception as error:
                raise LostDeviceError(one_line(error)) from error
            now = time.perf_counter()
            if chosen.echo is not None:
                request, start = next(echoes)
                request.prompt_logprobs[start:] = chosen.echo
            elif chosen.pooled is not None:
                self._pool(*next(echoes), chosen.pooled)
            self._take(plan.rows, part.slots, chosen, now, served)
            handling += time.perf_counter() - now
        self._count(launched, handling)
        self._meter.read(
            plan.num_decode_rows,
            plan.prompt_weight,
            time.perf_counter(),
            are_prompts_read=not self.executable.capabilities.runs_ahead
            or launched.output.is_mixed
            or any(chunk.chooses or chunk.pools for chunk in plan.step.prompts),
            is_read=bool(parts) or not self.executable.capabilities.runs_ahead,
            is_mixed=launched.output.is_mixed,
            has_drafts=bool(plan.step.drafts),
            has_capture=self._has_new_capture(),
        )
        return served

    def _has_new_capture(self) -> bool:
        """Return whether the executable captured a graph since the last call."""
        before, self._num_captures = self._num_captures, self.executable.num_captures
        return before != self._num_captures

    def _pool(self, request: RequestState, start: int, pooled: Pooled) -> None:
        """Add a chunk's hidden states. The last chunk ends the request."""
        pooling = request.pooling
        assert pooling is not None
        if not pooling.take(start, pooled, len(request.prompt)):
            return
        request.token_times.append(time.perf_counter())
        if pooling.is_number:
            self.scheduler.finish(request, STOPPED)
        else:
            self._fail(request, "the model's hidden states are no numbers", "not_a_number")

    def _count(self, launched: _StepInFlight, handling: float) -> None:
        plan, now, add = launched.plan, time.perf_counter(), self.stats.add
        num_rows, num_tokens = plan.num_decode_rows, plan.num_prompt_tokens
        kind = ("mixed" if num_tokens else "decode") if num_rows else "prompt"
        before = self._read_at if self._read_at is not None else launched.at
        add(STEP, now - max(launched.at, before), kind)
        add(HOST, handling, "take")
        add(SIZE, num_rows + num_tokens)
        self._read_at = now if self._runs() else None

    def _take(
        self,
        rows: Mapping[Slot, RequestState],
        slots: Sequence[Slot],
        chosen: SampledTokens,
        now: float,
        served: list[RequestState],
    ) -> None:
        """Give a part's tokens to their requests, and append these to ``served``."""
        take, counts = self._take_token, chosen.counts
        is_large = len(slots) >= _MIN_ROWS_TOGETHER
        if is_large and counts is None and chosen.logprobs is None and not any(chosen.why):
            more, num_dropped = self.scheduler.take_all(rows, slots, chosen.tokens, now=now)
            served += more
            self.num_dropped += num_dropped
            return
        if counts is None:
            for at, slot in enumerate(slots):
                request = rows.get(slot)
                if request is not None and take(request, chosen, at, now):
                    served.append(request)
            return
        first = 0
        for slot, count in zip(slots, counts, strict=True):
            request, last = rows.get(slot), first + count
            if request is not None:
                self.scheduler.settle(request, count)
                taken = [take(request, chosen, at, now) for at in range(first, last)]
                if any(taken):
                    served.append(request)
            first = last

    def _take_token(
        self, request: RequestState, chosen: SampledTokens, at: int, now: float
    ) -> bool:
        """Give a token to its request. Return whether the request takes it."""
        why, logprobs = chosen.why[at], chosen.logprobs
        if why == NOT_A_NUMBER:
            self._fail(request, "the model's logits are no numbers", "not_a_number")
            return False
        if not self.scheduler.take(request, chosen.tokens[at], is_end=why != GOES_ON):
            self.num_dropped += 1
            return False
        request.token_times.append(now)
        if logprobs is not None and request.sampling.logprobs is not None:
            request.logprobs.append(logprobs[at])
        return True


def _to_blame(plan: SchedulerOutput, running: Sequence[RequestState]) -> tuple[RequestState, ...]:
    """Return a step's requests: prompts first, newest first."""
    of_prompts = {chunk.slot for chunk in plan.step.prompts}
    involved = of_prompts.union(plan.step.decode)
    requests = [request for request in running if request.slot in involved]
    requests.sort(key=lambda request: (request.slot in of_prompts, request.order), reverse=True)
    return tuple(requests)
