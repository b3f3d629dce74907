"""The ranks of one model: rank 0, which leads and watches, and its followers.

Every rank says once a second that it lives, in every phase, so that one that has ended, hangs or is
stopped is noticed whatever the others do. The group lives or dies as one.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tilewright.distributed.channel import (
    Address,
    Channel,
    ChannelClosedError,
    Message,
)
from tilewright.distributed.parallel import ALONE
from tilewright.distributed.processes import how_process_is, is_stopped
from tilewright.errors import RankError, RankRefusedError, TilewrightError
from tilewright.utils.child_process import Child

BEAT, FAILED, END, GATHER, JOB, REFUSED = 1, 2, 3, 4, 5, 6
FIRST_FREE_KIND = 16
"""Kinds of messages from here on are the users' of a group."""

LOADING_SECONDS = 120.0
"""How long ranks that run may be silent, and others wait for them, while models are opened and
loaded: a library may hold Python's lock for long. A process that was stopped gets a step's limit.
"""

PATIENCE_SECONDS = 5.0
"""What children get to end by themselves."""

LOOK_SECONDS = 0.1
"""Between two looks at what may have failed meanwhile."""

_BEAT_SECONDS, _VERDICT_SECONDS = 1.0, 0.5
_RETURN_SECONDS = PATIENCE_SECONDS - 2 * _BEAT_SECONDS  # out of a kernel, once the group has failed


@dataclass(frozen=True, slots=True)
class Member:
    """A follower as rank 0 knows it; ``child`` where rank 0 has started it itself."""

    rank: int
    pid: int
    place: str
    channel: Channel
    child: Child | None = None

    @property
    def name(self) -> str:
        """``rank 1 (GPU 1, pid 4711)``."""
        return f"rank {self.rank} ({self.place}{', ' if self.place else ''}pid {self.pid})"


class Leader:
    """Rank 0's side: it tells all followers, hears each of them, and knows the first failure.

    Args:
        members: the followers, of ranks 1 to n - 1 in order.
        limit_s: how long one may be silent once all are ready; while they load, it is
            `LOADING_SECONDS` if that is more.

    ``ends_process``: whether the process ends, with the failure as its last line, where rank 0 is
    at work and does not come back to hear of it.
    """

    rank = 0

    def __init__(self, members: Sequence[Member], address: Address, limit_s: float) -> None:
        self.members, self.size = tuple(members), len(members) + 1
        self.address, self.limit_s = address, limit_s
        self.failure: TilewrightError | None = None
        self.number, self.ends_process = 0, False
        self._heard: list[deque[Message]] = [deque() for _ in members]
        self._last = [time.monotonic()] * len(members)
        self._is_loading = self._is_at_work = True
        self._is_told = self._is_closing = False
        self._changed = threading.Condition()
        self._aborts: list[Callable[[], object]] = []
        self._since: float | None = None
        self.step_limit_s: float | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ranks")
        self._watcher.start()

    def tell(self, kind: int, payload: bytes = b"") -> None:
        """Send a numbered message to every follower.

        Raises:
            RankError: where one is gone, then and ever after.
        """
        self.check()
        self.number += 1
        for member in self.members:
            try:
                member.channel.send(kind, self.number, payload)
            except ChannelClosedError as error:
                self.fail(member.rank, f"is gone ({error})")
                self.check()

    def hear(self, member: Member, seconds: float) -> Message:
        """What a follower says next, beats apart.

        Raises:
            RankError: where it says nothing in time, or the group has failed.
        """
        index, deadline = self.members.index(member), time.monotonic() + seconds
        with self._changed:
            while not self._heard[index]:
                self.check()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            else:
                return self._heard[index].popleft()
        self.fail(member.rank, f"did not answer within {seconds:g} s")
        raise self._failed()

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Peers`."""
        found = [data]
        for member in self.members:
            message = self.hear(member, LOADING_SECONDS)
            if message.kind != GATHER:
                self.fail(member.rank, f"said something else than was asked ({message.kind})")
                raise self._failed()
            found.append(message.payload)
        self.tell(GATHER, msgspec.msgpack.encode(found))
        return found

    def is_ready(self) -> None:
        """From now on followers may be silent no longer than the limit."""
        self._last = [time.monotonic()] * len(self.members)
        self._is_loading = self._is_at_work = False

    def abort_with(self, abort: Callable[[], object]) -> None:
        """Let the failure of the group, and its end, call ``abort`` too, from any thread."""
        self._aborts.append(abort)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """What rank 0 does in here takes no longer than ``step_limit_s``, where there is one."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """What rank 0 does in here may wait for others in a kernel; it loads so from the start."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def check(self) -> None:
        """Raise the group's failure where there is one (RankError, RankRefusedError)."""
        if self.failure is not None:
            raise self._failed()

    def fail(self, rank: int, said: str) -> None:
        """Note the first failure, with how the rank's process is, and end the group."""
        if rank == 0:
            self.end(f"rank 0 {said}")
            return
        if self.failure is None:
            member = self.members[rank - 1]
            self._note(RankError(f"{member.name} {said}{self._state_of(member)}"))

    def refuse(self, rank: int, said: str) -> None:
        """Note that a rank was asked for what cannot be done, and end the group."""
        self._note(RankRefusedError(f"rank {rank}: {said}"))

    def end(self, said: str) -> None:
        """Note that rank 0 itself cannot go on, and end the group."""
        self._note(RankError(said))

    def close(self) -> None:
        """End the followers: those that run get a moment to end by themselves, then SIGKILL."""
        if self._is_closing:
            return
        self._is_closing = True
        for member in self.members:
            with contextlib.suppress(ChannelClosedError):
                if self.failure is None:
                    member.channel.send(END)
        self._watcher.join()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for member in self.members:
            if member.child is not None:
                if not is_stopped(member.pid):
                    member.child.wait(max(0.0, deadline - time.monotonic()))
                member.child.kill()
                member.child.close()
            member.channel.close()
        self._shut()

    def _note(self, failure: TilewrightError) -> None:
        """Keep the first failure, and end the group."""
        with self._changed:
            self.failure = self.failure or (None if self._is_closing else failure)
            self._changed.notify_all()
        self._shut()

    def _failed(self) -> TilewrightError:
        assert self.failure is not None
        self._is_told = True
        return self.failure

    def _state_of(self, member: Member) -> str:
        """What is known of a process; a killed one may take a moment to be seen as ended."""
        if member.child is None:
            return ""
        ended = member.child.wait(_VERDICT_SECONDS)
        if ended is None:
            return f"; its process {how_process_is(member.pid)}"
        last = f": {ended.last[:200]}" if ended.last else ""
        how = f"signal {-ended.code} ({ended.how})" if ended.code < 0 else ended.how
        return f"; its process ended by {how}{last}"

    def _shut(self) -> None:
        for member in self.members:
            hang_up(member.channel.connection)
        for abort in self._aborts:
            abort()

    def _watch(self) -> None:
        """Hear all followers, say that rank 0 lives, notice who does not."""
        sockets = {m.channel.connection: i for i, m in enumerate(self.members)}
        next_beat = 0.0
        while self.failure is None and not self._is_closing:
            ready = select.select(list(sockets), [], [], LOOK_SECONDS)[0]
            for each in ready:
                self._take(sockets[each])
            now = time.monotonic()
            for index, member in enumerate(self.members):
                silent, pid = now - self._last[index], member.pid if member.child else None
                limit = overdue(silent, self.limit_s, is_loading=self._is_loading, pid=pid)
                if limit is not None and self.failure is None:
                    self.fail(member.rank, f"has been silent for {limit:g} s")
            since, limit = self._since, self.step_limit_s
            if limit is not None and since is not None and now - since > limit:
                self.end(f"step {self.number} did not end within {limit:g} s")
            if now >= next_beat:
                next_beat = now + _BEAT_SECONDS
                for member in self.members:
                    member.channel.send_if_free(BEAT)
        if self.ends_process and self.failure is not None:
            self._insist(self.failure)

    def _insist(self, failure: TilewrightError) -> None:
        """End the process if rank 0 is still in a kernel or a library a while after the failure."""
        began = time.monotonic()
        while time.monotonic() - began < _RETURN_SECONDS:
            time.sleep(LOOK_SECONDS)
            if self._is_told or self._is_closing:
                return
            if not self._is_at_work:
                began = time.monotonic()
        for member in self.members:
            if member.child is not None:
                member.child.kill()
        os.write(2, f"tilewright: {failure}\n".encode())
        os._exit(failure.exit_code)

    def _take(self, index: int) -> None:
        member = self.members[index]
        try:
            messages = member.channel.read_ready()
        except ChannelClosedError:
            if not self._is_closing:
                self.fail(member.rank, "left")
            return
        self._last[index] = time.monotonic()
        for message in messages:
            if message.kind == FAILED:
                said = message.payload.decode(errors="replace")
                self.fail(message.number if message.number >= 0 else member.rank, said)
            elif message.kind == REFUSED:
                self.refuse(member.rank, message.payload.decode(errors="replace"))
            elif message.kind != BEAT:
                with self._changed:
                    self._heard[index].append(message)
                    self._changed.notify_all()


class Follower:
    """A follower's side: it hears rank 0, and ends when rank 0 does, or is silent for too long.

    ``limit_s``: how long that is, as for `Leader`. ``ends_process``: whether the process ends where
    it does not by itself.
    """

    def __init__(self, rank: int, size: int, channel: Channel, address: Address) -> None:
        self.rank, self.size, self.channel, self.address = rank, size, channel, address
        self.limit_s, self.ends_process = ALONE.peer_limit, False
        self._is_loading, self._leader = True, channel.process()
        self._ended = threading.Event()
        self._beater = threading.Thread(target=self._beat, daemon=True, name="beat")
        self._beater.start()

    def receive(self) -> Message:
        """What rank 0 says next, beats apart.

        Raises:
            ChannelClosedError: where rank 0 has gone, or has not even said that it lives.
        """
        while True:
            message = self.channel.receive(_BEAT_SECONDS)
            limit = self._overdue()
            if message is None and limit is not None:
                raise ChannelClosedError(f"it has been silent for {limit:g} s")
            if message is not None and message.kind != BEAT:
                return message

    def all_gather(self, data: bytes) -> list[bytes]:
        """See `Peers`."""
        self.channel.send(GATHER, 0, data)
        message = self.receive()
        if message.kind != GATHER:
            raise ChannelClosedError("rank 0 has ended the group")
        return msgspec.msgpack.decode(message.payload, type=list[bytes])

    def is_ready(self) -> None:
        """From now on rank 0 may be silent no longer than the limit."""
        self._is_loading = False

    def fail(self, said: str, *, of: int = -1) -> None:
        """Tell rank 0 why this rank cannot go on, or that the rank ``of`` is why."""
        self._say(FAILED, of, said)

    def refuse(self, said: str) -> None:
        """Tell rank 0 that what this rank was asked for cannot be done."""
        self._say(REFUSED, 0, said)

    def _say(self, kind: int, number: int, said: str) -> None:
        with contextlib.suppress(ChannelClosedError):
            self.channel.send(kind, number, said.encode()[:2000])

    def close(self) -> None:
        """Leave the group."""
        self._ended.set()
        self.channel.close()

    def _overdue(self) -> float | None:
        silent = time.monotonic() - self.channel.heard
        return overdue(silent, self.limit_s, is_loading=self._is_loading, pid=self._leader)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self.channel.send_if_free(BEAT)
            has_gone = not self.channel.listen() or self._overdue() is not None
            if self.ends_process and has_gone:
                if not self._ended.wait(_RETURN_SECONDS):
                    os._exit(RankError.exit_code)  # in a kernel or a library that does not return
                return


def hang_up(connection: socket.socket) -> None:
    """End what waits on a socket, here and at its other end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def overdue(silent_s: float, limit_s: float, *, is_loading: bool, pid: int | None) -> float | None:
    """The limit that a rank's silence of ``silent_s`` seconds is beyond; None: of none yet.

    ``pid``: its process, if that is of this machine.
    """
    longest = max(limit_s, LOADING_SECONDS) if is_loading else limit_s
    if silent_s > longest:
        return longest
    is_halted = silent_s > limit_s and pid is not None and is_stopped(pid)
    return limit_s if is_halted else None
