"""Runs rows on the server's engine service, in this process and without HTTP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tilewright.batch.preparing import Preparer
from tilewright.batch.records import Item, Record, refused
from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.errors import CompileError, RankError, one_line
from tilewright.runtime.messages import (
    AbortRequest,
    EngineReady,
    EngineStartFailed,
    EngineStarting,
    FromEngine,
    Heartbeat,
    NewTokens,
    RequestFailed,
    RequestFinished,
    RequestStarted,
)
from tilewright.runtime.scheduling.engine_stats import STEP
from tilewright.runtime.service import EngineService, QueueTransport
from tilewright.serve.engines.request_tracker import RequestTimes
from tilewright.serve.output.choice import ChoiceStream
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.responses import CompletionTask

_FED_A_TURN = 16
"""Maximum number of rows prepared between two steps, so that steps continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A finished row with its times.

    Attributes:
        record: the answer or the error.
        first_s: seconds from the slot to the first token. None without a token.
        total_s: seconds from the slot to the last token.
        ignored: unknown keys of its body.
    """

    record: Record
    first_s: float | None = None
    total_s: float | None = None
    ignored: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _ActiveChoice:
    """A running choice of a row.

    Attributes:
        live: the row.
        index: number of the choice.
        times: the request's times.
        tokens, scores: received tokens that are not decoded, with log probabilities.
        echo: log probabilities of the prompt, received with the first token.
        drafts: verified draft tokens so far, and the accepted ones.
    """

    live: _ActiveRequest
    index: int
    times: RequestTimes
    tokens: list[int] = field(default_factory=list)
    scores: list[LogProbs] = field(default_factory=list)
    echo: tuple[LogProbs, ...] = ()
    drafts: tuple[int, int] = (0, 0)

    @property
    def choice(self) -> ChoiceStream:
        return self.live.job.choices[self.index]


@dataclass(slots=True, eq=False)
class _ActiveRequest:
    """A running row."""

    item: Item
    job: CompletionTask
    is_watched: bool
    active: dict[int, _ActiveChoice] = field(default_factory=dict)
    done: list[_ActiveChoice] = field(default_factory=list)


class BatchEngine:
    """Answers rows with an :class:`EngineService` and continuous batching.

    As many rows wait as there are slots. Further rows are prepared while the device computes.

    Attributes:
        num_output: sampled token count.
        num_first: number of first tokens among them. Prefill steps sample these.
    """

    def __init__(
        self, service: EngineService, transport: QueueTransport, preparer: Preparer
    ) -> None:
        self._service, self._transport, self._preparer = service, transport, preparer
        self._numbers = itertools.count(1)
        self._active: dict[int, _ActiveChoice] = {}
        self._num_waiting = 0
        self._most_waiting = service.loop.executable.capabilities.max_num_seqs
        self.num_output = self.num_first = 0

    @property
    def num_steps(self) -> int:
        """The step count with decode rows."""
        found = self._service.loop.stats.found
        kinds = (found.get(f"{STEP}/{kind}") for kind in ("decode", "mixed"))
        return sum(sum(tally.counts) for tally in kinds if tally is not None)

    def run(self, items: Iterator[Item | Record]) -> Iterator[list[FinishedRequest]]:
        """Answer rows in approximate order. Yield the finished rows after every step.

        A record among the items is finished at once.

        Raises:
            CompileError: if the device is lost.
            RankError: if a rank is lost.
        """
        is_empty = False
        while not is_empty or self._active:
            ended: list[FinishedRequest] = []
            for _ in range(_FED_A_TURN):
                if is_empty or self._num_waiting >= self._most_waiting:
                    break
                item = next(items, None)
                is_empty = item is None
                if isinstance(item, Record):
                    ended.append(FinishedRequest(record=item))
                elif item is not None:
                    self._give(item, ended)
            if self._active:
                self._turn(ended)
            yield ended

    def _turn(self, ended: list[FinishedRequest]) -> None:
        try:
            self._service.turn()
        except RankError as error:
            raise RankError(f"{error}; --resume continues") from error
        except Exception as error:
            said = f"the engine has ended: {type(error).__name__}: {one_line(error)}"
            raise CompileError(f"{said}; --resume continues") from error
        outbox = self._transport.outbox
        while outbox:
            self._receive(outbox.popleft(), ended)

    def _give(self, item: Item, ended: list[FinishedRequest]) -> None:
        """Submit a row. An invalid row is finished."""
        try:
            job = self._preparer.job(item)
        except ApiError as error:
            ended.append(FinishedRequest(record=refused(item.row, error)))
            return
        is_watched = any(each.matcher.has_stops or each.reader for each in job.choices)
        live, now = _ActiveRequest(item, job, is_watched), time.perf_counter()
        first: dict[tuple[int, ...], int] = {}
        for index, choice in enumerate(job.choices):
            number = next(self._numbers)
            like = first.setdefault(choice.request.prompt, number)
            self._active[number] = live.active[number] = _ActiveChoice(
                live, index, RequestTimes(now)
            )
            self._num_waiting += 1
            self._transport.inbox.append(
                msgspec.structs.replace(
                    choice.request, request_id=number, like=like if like != number else None
                )
            )

    def _receive(self, message: FromEngine, ended: list[FinishedRequest]) -> None:
        if isinstance(message, EngineReady | EngineStarting | EngineStartFailed | Heartbeat):
            return
        active = self._active.get(message.request_id)
        if active is None:
            return
        if isinstance(message, NewTokens):
            self._receive_tokens(message, active, ended)
        elif isinstance(message, RequestStarted):
            self._num_waiting -= active.times.started_at is None
            active.times.on_started(message)
            active.choice.started = active.choice.started or message
        elif isinstance(message, RequestFinished):
            self._push(active)
            active.choice.finished = message
            active.choice.end(message.reason)
            self._leave(message.request_id, ended)
        else:
            assert isinstance(message, RequestFailed), message
            self._fail(active, message, ended)

    def _receive_tokens(
        self, message: NewTokens, active: _ActiveChoice, ended: list[FinishedRequest]
    ) -> None:
        self.num_output += len(message.tokens)
        self.num_first += active.times.first_at is None
        active.times.on_tokens()
        active.tokens += message.tokens
        active.scores += message.logprobs
        active.echo = active.echo or message.echo
        active.drafts = message.num_draft_tokens, message.num_accepted_tokens
        if active.live.is_watched:  # a stop string or a call may end the answer
            self._push(active)
            if active.choice.finish_reason is not None:
                active.choice.finished = active.times.finished(message.request_id)
                self._transport.inbox.append(AbortRequest(message.request_id))
                self._leave(message.request_id, ended)

    def _push(self, active: _ActiveChoice) -> None:
        """Decode the received tokens. Most answers are decoded once, at their end."""
        choice = active.choice
        if active.tokens:
            if choice.awaits_echo:
                choice.score_prompt(active.echo)
            tokens, scores = tuple(active.tokens), tuple(active.scores)
            choice.push(NewTokens(0, tokens, scores, (), *active.drafts))
            active.tokens.clear()
            active.scores.clear()

    def _leave(self, number: int, ended: list[FinishedRequest]) -> None:
        active = self._active.pop(number)
        live = active.live
        del live.active[number]
        live.done.append(active)
        self._num_waiting -= active.times.started_at is None
        if not live.active:
            ended.append(_ended(live))

    def _fail(
        self, active: _ActiveChoice, message: RequestFailed, ended: list[FinishedRequest]
    ) -> None:
        """Finish a row with a choice's error."""
        live = active.live
        for number, each in live.active.items():
            if number != message.request_id:
                self._transport.inbox.append(AbortRequest(number))
            self._num_waiting -= each.times.started_at is None
            del self._active[number]
        error = ApiError(500, message.code, message.message)
        ended.append(FinishedRequest(record=refused(live.item.row, error)))


def _ended(live: _ActiveRequest) -> FinishedRequest:
    usage = live.job.usage()
    record = Record(
        row=live.item.row,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        body=msgspec.Raw(msgspec.json.encode(live.job.whole())),
    )
    return FinishedRequest(
        record=record,
        first_s=_first(live.done),
        total_s=_total(live.done),
        ignored=live.job.ignored,
    )


def _first(done: Sequence[_ActiveChoice]) -> float | None:
    times = [active.times.finished(0) for active in done]
    return min((end.prefill_s for end in times if end is not None), default=None)


def _total(done: Sequence[_ActiveChoice]) -> float | None:
    times = [active.times.finished(0) for active in done]
    return max((end.prefill_s + end.decode_s for end in times if end is not None), default=None)
