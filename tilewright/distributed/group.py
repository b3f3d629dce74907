"""A group of ranks: rank 0 leads and monitors its followers.

Every rank sends a heartbeat each second, in every phase. Dead, hung or stopped ranks are therefore
noticed even in long operations. A failure of a rank ends the whole group.
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
    Frame,
)
from tilewright.distributed.parallel import SINGLE_RANK
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
class FollowerHandle:
    """A follower's record on rank 0. ``child`` is its process if rank 0 started it."""

    rank: int
    pid: int
    place: str
    channel: Channel
    child: Child | None = None

    @property
    def name(self) -> str:
        """Return a text like ``rank 1 (GPU 1, pid 4711)``."""
        return f"rank {self.rank} ({self.place}{', ' if self.place else ''}pid {self.pid})"


class Leader:
    """Rank 0's side of the group: sends to followers, receives from them, stores the first failure.

    Args:
        members: Followers, ranks 1 to n - 1 in order.
        address: The group's address.
        limit_s: Maximum silence of a ready follower in seconds. While loading, at least
            `LOADING_SECONDS`.

    ``ends_process``: exit the process with the failure as last line, if rank 0 is blocked in a
    kernel or library.
    """

    rank = 0

    def __init__(self, members: Sequence[FollowerHandle], address: Address, limit_s: float) -> None:
        self.members, self.size = tuple(members), len(members) + 1
        self.address, self.limit_s = address, limit_s
        self.failure: TilewrightError | None = None
        self.number, self.ends_process = 0, False
        self._heard: list[deque[Frame]] = [deque() for _ in members]
        self._last = [time.monotonic()] * len(members)
        self._is_loading = self._is_at_work = True
        self._is_notified = self._is_closing = False
        self._changed = threading.Condition()
        self._aborts: list[Callable[[], object]] = []
        self._since: float | None = None
        self.step_limit_s: float | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ranks")
        self._watcher.start()

    def tell(self, kind: int, payload: bytes = b"") -> None:
        """Send a numbered message to every follower.

        Raises:
            RankError: A follower has failed now or before.
        """
        self.check()
        self.number += 1
        for member in self.members:
            try:
                member.channel.send(kind, self.number, payload)
            except ChannelClosedError as error:
                self.fail(member.rank, f"is gone ({error})")
                self.check()

    def receive(self, member: FollowerHandle, seconds: float) -> Frame:
        """Return a follower's next message, except heartbeats.

        Raises:
            RankError: There is no message in time, or the group has failed.
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
            message = self.receive(member, LOADING_SECONDS)
            if message.kind != GATHER:
                self.fail(member.rank, f"sent an unexpected message ({message.kind})")
                raise self._failed()
            found.append(message.payload)
        self.tell(GATHER, msgspec.msgpack.encode(found))
        return found

    def is_ready(self) -> None:
        """End the loading phase: followers' silence limits apply from now on."""
        self._last = [time.monotonic()] * len(self.members)
        self._is_loading = self._is_at_work = False

    def abort_with(self, abort: Callable[[], object]) -> None:
        """Register a function for the failure and end of the group. Any thread may call it."""
        self._aborts.append(abort)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Limit rank 0's work in this block to ``step_limit_s``, if set."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Mark a block in which rank 0 may be blocked in a kernel. Loading is also marked."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def check(self) -> None:
        """Raise the group's failure, if any (RankError, RankRefusedError)."""
        if self.failure is not None:
            raise self._failed()

    def fail(self, rank: int, said: str) -> None:
        """Store the first failure with the state of the rank's process, and end the group."""
        if rank == 0:
            self.end(f"rank 0 {said}")
            return
        if self.failure is None:
            member = self.members[rank - 1]
            self._note(RankError(f"{member.name} {said}{self._state_of(member)}"))

    def refuse(self, rank: int, said: str) -> None:
        """Store a rejected request of a rank as failure, and end the group."""
        self._note(RankRefusedError(f"rank {rank}: {said}"))

    def end(self, said: str) -> None:
        """Store rank 0's own failure, and end the group."""
        self._note(RankError(said))

    def close(self) -> None:
        """End the followers. Running followers get some time to exit before SIGKILL."""
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
        """Store the first failure and end the group."""
        with self._changed:
            self.failure = self.failure or (None if self._is_closing else failure)
            self._changed.notify_all()
        self._shut()

    def _failed(self) -> TilewrightError:
        assert self.failure is not None
        self._is_notified = True
        return self.failure

    def _state_of(self, member: FollowerHandle) -> str:
        """Return a process's known state. A killed process may need a moment to appear as
        ended.
        """
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
        """Receive from all followers, send heartbeats, and detect silent followers."""
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
        """Exit the process if rank 0 is still blocked in a kernel or library after a failure."""
        began = time.monotonic()
        while time.monotonic() - began < _RETURN_SECONDS:
            time.sleep(LOOK_SECONDS)
            if self._is_notified or self._is_closing:
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
    """A follower's side of the group. It ends with rank 0, or after rank 0's silence.

    ``limit_s`` is the maximum silence as for `Leader`. ``ends_process``: exit the process if it is
    blocked.
    """

    def __init__(self, rank: int, size: int, channel: Channel, address: Address) -> None:
        self.rank, self.size, self.channel, self.address = rank, size, channel, address
        self.limit_s, self.ends_process = SINGLE_RANK.peer_limit, False
        self._is_loading, self._leader = True, channel.process()
        self._ended = threading.Event()
        self._beater = threading.Thread(target=self._beat, daemon=True, name="beat")
        self._beater.start()

    def receive(self) -> Frame:
        """Return rank 0's next message, except heartbeats.

        Raises:
            ChannelClosedError: Rank 0 has ended or is silent.
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
        """End the loading phase: rank 0's silence limit applies from now on."""
        self._is_loading = False

    def fail(self, said: str, *, of: int = -1) -> None:
        """Report this rank's failure to rank 0, or the failure of the rank ``of``."""
        self._say(FAILED, of, said)

    def refuse(self, said: str) -> None:
        """Report to rank 0 that this rank cannot do its requested work."""
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
    """Shut down a socket to unblock both ends."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def overdue(silent_s: float, limit_s: float, *, is_loading: bool, pid: int | None) -> float | None:
    """Return the exceeded limit for a silence of ``silent_s`` seconds, or None.

    ``pid`` is the rank's process if it is on this machine.
    """
    longest = max(limit_s, LOADING_SECONDS) if is_loading else limit_s
    if silent_s > longest:
        return longest
    is_halted = silent_s > limit_s and pid is not None and is_stopped(pid)
    return limit_s if is_halted else None
