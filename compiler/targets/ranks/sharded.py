"""An executable over several ranks: the leader schedules and samples, followers run the same steps.

The leader sends a step before running it. Followers return nothing. Collectives inside a step run
between the ranks' executables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tilewright.compiler.targets.interface.base import Executable, MemoryUse
from tilewright.compiler.targets.interface.step import Slot, Step, StepOutput
from tilewright.compiler.targets.interface.step_bytes import read_step, step_bytes
from tilewright.compiler.targets.interface.token_masks import TokenMask
from tilewright.compiler.targets.ranks.rank_check import StepChecksum, steps_between
from tilewright.distributed.channel import ChannelClosedError
from tilewright.distributed.group import (
    END,
    FIRST_FREE_KIND,
    Follower,
    Leader,
)
from tilewright.distributed.launch import LaunchedRanks
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import ExchangeError, RankError, one_line

_KINDS = range(FIRST_FREE_KIND, FIRST_FREE_KIND + 7)
_STEP, _AGAIN, _RESET, _PREPARE, _CHOSEN, _CHECK, _COUNTS = _KINDS
_LIMITS = (
    *("max_num_seqs", "num_pages", "num_snapshots"),
    *("max_prompts", "max_step_tokens", "most_shared", "max_drafts"),
)


class ShardedExecutable(Executable):
    """The leader's executable, which also drives the followers. Every rank calls `meet` first.

    Memory is the leader's.
    """

    def __init__(self, own: Executable, ranks: LaunchedRanks) -> None:
        self.own, self._ranks = own, ranks
        self._leader: Leader = ranks.leader
        self.capabilities, self.contract = own.capabilities, own.contract
        self.vocab_size = own.vocab_size
        self.device_name, self.device_detail = own.device_name, own.device_detail
        self.notes, self.encoder = own.notes, own.encoder
        self.mesh = f"1x{ranks.leader.size}"
        self._last: tuple[Slot, ...] | None = None
        self._trace, self._between = StepChecksum(), steps_between()
        ranks.leader.is_ready()

    @property
    def num_tokens(self) -> int | None:
        """See `Executable`."""
        return self.own.num_tokens

    @num_tokens.setter
    def num_tokens(self, value: int | None) -> None:
        self.own.num_tokens = value

    @property
    def image_value_bytes(self) -> int:
        return self.own.image_value_bytes

    def step(self, step: Step) -> StepOutput:
        if step.proposes:  # only the leader has a draft layer
            return self.own.step(step)
        done = self._trace.num_steps
        if self._between and done and done % self._between == 0:
            self._compare()
        sent = self.own.step_for_followers(step)
        is_plain = sent == Step(decode=sent.decode)
        if is_plain and sent.decode is self._last:
            self._leader.tell(_AGAIN)
            self._trace.add(b"")
        else:
            data = step_bytes(sent)
            self._leader.tell(_STEP, data)
            self._trace.add(data)
            self._last = sent.decode if is_plain else None
        output: StepOutput = self._limited(self.own.step, step)
        if step.drafts and (counts := self.own.emitted_counts()):
            self._leader.tell(_COUNTS, counts)
        guarded = [
            dataclasses.replace(part, read=functools.partial(self._limited, part.read))
            for part in output.parts
        ]
        return dataclasses.replace(output, parts=tuple(guarded))

    def choose(self, output: StepOutput, allowed: TokenMask) -> None:
        self._leader.tell(_CHOSEN)
        self._limited(self.own.choose, output, allowed)

    def reset(self) -> None:
        self._leader.tell(_RESET)
        self._last = None
        self._guarded(self.own.reset)

    def prepare(self) -> None:
        self._leader.tell(_PREPARE)
        self._guarded(self.own.prepare)

    @property
    def num_captures(self) -> int:
        return self.own.num_captures

    def check(self) -> None:
        self._leader.check()

    def memory(self) -> MemoryUse:
        return self.own.memory()

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return self.own.state_bytes(num_positions, num_sequences)

    def close(self) -> None:
        self._ranks.close()
        self.own.close()

    def _compare(self) -> None:
        """Raise RankError if a rank has diverged from the leader."""
        self._leader.tell(_CHECK)
        own = self._trace.summary(self.own)
        for rank, found in enumerate(self._leader.all_gather(own)):
            if found != own:
                other, expected = found.decode(errors="replace"), own.decode()
                self._leader.fail(rank, f"is at {other}; rank 0 is at {expected}")
        self._leader.check()

    def _limited(self, run: Callable[..., Any], *arguments: Any) -> Any:
        with self._leader.in_step():
            return self._guarded(run, *arguments)

    def _guarded(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run the leader's work. The followers have already started the step, even if the leader
        fails.

        Raises:
            RankError: A rank failed now or before.
        """
        try:
            with self._leader.at_work():
                return run(*arguments)
        except ExchangeError as error:
            self._leader.fail(error.rank, error.of_step(self._leader.number))
        except Exception as error:
            self._leader.end(f"rank 0 failed in step {self._leader.number}: {one_line(error)}")
            raise
        self._leader.check()
        raise AssertionError("a failed group has a failure")


def meet(own: Executable, peers: SetupCollectives) -> None:
    """Connect a rank's executable and reduce its capabilities to the minimum over all ranks.

    All ranks call this function.
    """
    own.join(peers)
    if own.encoder is not None:
        own.encoder.prepare()  # a slow disk in a step would look like a lost rank
    limits = own.capabilities
    least: dict[str, Any] = dict(peers.least({name: getattr(limits, name) for name in _LIMITS}))
    most = least["most_shared"]
    if most < limits.most_shared:
        note = f"ranks share passes of up to {most:,} tokens of prompts, as the least of them does"
        own.notes = (*own.notes, note)
    passes = tuple(
        (rows, tuple(each for each in sizes if each <= most)) for rows, sizes in limits.passes
    )
    own.capabilities = dataclasses.replace(limits, passes=passes, **least)


def serve_steps(executable: Executable, follower: Follower) -> None:
    """Run steps from the leader until the group ends.

    Raises:
        RankError: The leader disconnected, or a collective failed.
    """
    follower.is_ready()
    again, trace = Step(), StepChecksum()
    while True:
        try:
            message = follower.receive()
        except ChannelClosedError as error:
            raise RankError(f"rank 0 has ended ({error})") from None
        if message.kind == END:
            return
        try:
            if message.kind == _STEP:
                again = read_step(message.payload)
            if message.kind in (_STEP, _AGAIN):
                trace.add(message.payload)
                executable.follow(again)
            elif message.kind == _CHOSEN:
                executable.follow_choice()
            elif message.kind == _COUNTS:
                executable.follow_counts(message.payload)
            elif message.kind == _CHECK:
                follower.all_gather(trace.summary(executable))
            elif message.kind == _RESET:
                executable.reset()
            elif message.kind == _PREPARE:
                executable.prepare()
        except ExchangeError as error:
            said = error.of_step(message.number)
            follower.fail(said, of=error.rank)
            raise RankError(f"rank {error.rank} {said}") from None
        except Exception as error:
            follower.fail(f"failed in step {message.number}: {one_line(error)}")
            raise
