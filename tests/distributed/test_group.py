"""Ranks meet, prove a token, and notice each other's end, silence and failure."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.distributed.groups import JOINED, process_group, thread_group
from tests.utils.test_child_process import gone
from tilewright.distributed import group, peers
from tilewright.distributed.channel import (
    Address,
    Channel,
    ChannelClosedError,
    RankListener,
    call,
)
from tilewright.distributed.group import (
    END,
    Follower,
    overdue,
)
from tilewright.distributed.handshake import check_equal
from tilewright.distributed.launch import gather_here
from tilewright.distributed.peers import SetupCollectives
from tilewright.distributed.processes import is_stopped
from tilewright.distributed.worker import wait_for
from tilewright.errors import ConfigError, RankError, RankRefusedError
from tilewright.utils.child_process import Child

WAITS = "while follower.receive().kind != 3: pass\n"
EARLY = "import time; time.sleep(60)\n"


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "PATIENCE_SECONDS", 0.3)


def test_frames_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    big = os.urandom(1 << 20)
    thread = threading.Thread(target=lambda: [sender.send(7, i, big[:i]) for i in (0, 1, 1 << 20)])
    thread.start()
    for number in (0, 1, 1 << 20):
        message = receiver.receive(5.0)
        assert message is not None
        assert (message.kind, message.number, message.payload) == (7, number, big[:number])
    thread.join()
    assert receiver.receive(0.01) is None
    sender.close()
    with pytest.raises(ChannelClosedError):
        receiver.receive(5.0)


@pytest.mark.parametrize("is_local", [True, False])
def test_who_does_not_know_the_token_is_hung_up_on(tmp_path: Path, is_local: bool) -> None:
    address = Address(path=tmp_path / "s") if is_local else Address("127.0.0.1")
    listener = RankListener(address, b"right")
    found: list[tuple[int, socket.socket] | None] = []
    thread = threading.Thread(target=lambda: found.append(listener.accept(time.monotonic() + 5)))
    thread.start()
    with pytest.raises(ConfigError, match="hung up on rank 3; allowed: the same TILEWRIGHT_TOKEN"):
        call(listener.address, 3, b"wrong", seconds=5)
    right = call(listener.address, 1, b"right", seconds=5)
    thread.join()
    assert found[0] is not None and found[0][0] == 1
    right.close()
    found[0][1].close()
    if address.path is not None:
        assert address.path.stat().st_mode & 0o777 == 0o600
    listener.close()
    with pytest.raises(ConfigError, match=r"did not answer rank 1 within 0\.1 s"):
        call(listener.address, 1, b"right", seconds=0.1)


def test_a_rank_0_that_is_stopped_before_it_answers_is_missed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tilewright.distributed.channel import Address, RankListener\n"
        "kept = RankListener(Address(path=Path(sys.argv[1])), b'x'); print('there', flush=True)\n"
        "time.sleep(60)\n"
    )
    address = Address(path=tmp_path / "s")
    given = [sys.executable, "-c", program, str(address.path)]
    with subprocess.Popen(given, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
            with pytest.raises(ConfigError, match="it took the call and said nothing"):
                call(address, 1, b"x", seconds=0.3, limit_s=0.1)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(RankError, match=r"^rank 0 has been stopped for 0\.3 s$"):
                call(address, 1, b"x", seconds=20, limit_s=0.3)
        finally:
            process.kill()


def test_ranks_gather_and_connect_to_each_other(tmp_path: Path) -> None:
    heard: dict[int, object] = {}

    def follow(follower: Follower, token: bytes) -> None:
        _meet(SetupCollectives(follower, token, 5.0), heard)
        while follower.receive().kind != END:
            pass

    with thread_group(tmp_path, 3, follow) as (leader, ranks):
        _meet(SetupCollectives(leader, ranks.token, 5.0), heard)
    gathered = [b"0", b"1", b"2"], {"pages": 10}
    others = {0: [b"1", b"2"], 1: [b"0", b"2"], 2: [b"0", b"1"]}
    assert heard == {rank: (*gathered, found) for rank, found in others.items()}


def _meet(peers: SetupCollectives, heard: dict[int, object]) -> None:
    gathered = peers.all_gather(str(peers.rank).encode())
    least = peers.least({"pages": 10 + peers.rank})
    sockets = peers.connect()
    for each in sockets.values():
        each.sendall(str(peers.rank).encode())
    heard[peers.rank] = gathered, least, [sockets[rank].recv(1) for rank in sorted(sockets)]
    for each in sockets.values():
        each.close()


def test_a_difference_is_named_with_both_values() -> None:
    same = {"code": "a" * 64, "torch": "2.11.0"}
    check_equal([same, same])
    with pytest.raises(ConfigError, match=r"rank 0 has torch 2\.11\.0 and rank 1 2\.12\.0"):
        check_equal([same, {**same, "torch": "2.12.0"}])
    with pytest.raises(ConfigError, match="rank 0 has code aaaaaaaaaaaa and rank 2 bbbbbbbbbbbb;"):
        check_equal([same, same, {**same, "code": "b" * 64}])
    with pytest.raises(ConfigError, match="rank 0 has extra nothing and rank 1 x"):
        check_equal([same, {**same, "extra": "x"}])


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, r"rank 1 \(pid \d+\) left; its process ended by signal 9 \(SIGKILL\)"),
        (signal.SIGSTOP, r"rank 1 \(pid \d+\) has been silent for 1\.5 s; its process is stopped"),
    ],
)
def test_the_end_and_the_halt_of_a_rank_end_the_group(number: int, said: str) -> None:
    ranks = process_group(WAITS, 3)
    leader = ranks.leader
    leader.is_ready()
    leader.tell(16)
    os.kill(leader.members[0].pid, number)
    began = time.monotonic()
    while leader.failure is None and time.monotonic() - began < 6:
        time.sleep(0.02)
    with pytest.raises(RankError, match=said):
        leader.check()
    with pytest.raises(RankError, match=said):  # then and ever after
        leader.tell(16)
    pids = [member.pid for member in leader.members]
    ranks.close()
    assert time.monotonic() - began < 1.5 + 5
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("place", ["leader.at_work()", "contextlib.nullcontext()"])
def test_a_rank_0_that_does_not_come_back_is_ended(place: str) -> None:
    """In a kernel or a library; one that waits for its user is not, and hears of it later."""
    program = (
        "import contextlib, os, signal, sys, time\n"
        "from tilewright.distributed import group, launch\n"
        "from tilewright.errors import RankError\n"
        "group._RETURN_SECONDS = 0.3\n"
        f"follow = {JOINED + WAITS!r}\n"
        "leader = launch.gather_here(2, ('-c', follow), limit_s=1.5).leader\n"
        "leader.ends_process = True\n"
        "leader.is_ready()\n"
        f"with {place}:\n"
        "    os.kill(leader.members[0].pid, signal.SIGKILL)\n"
        "    time.sleep(2.5)\n"
        "try:\n    leader.check()\n"
        "except RankError as error:\n    sys.exit(f'told: {error}')\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert time.monotonic() - began < 20
    said = r"rank 1 \(pid \d+\) left; its process ended by signal 9 \(SIGKILL\)\n"
    is_held = place == "leader.at_work()"
    assert re.fullmatch(("tilewright: " if is_held else "told: ") + said, done.stderr)
    assert done.returncode == (RankError.exit_code if is_held else 1)


def test_a_failure_aborts_what_waits_without_a_limit() -> None:
    """A follower is killed: what was registered is called at once, on rank 0."""
    ranks, called = process_group(WAITS), threading.Event()
    SetupCollectives(ranks.leader, b"", 1.5).abort_with(called.set)
    ranks.leader.is_ready()
    assert not called.wait(0.2)
    os.kill(ranks.leader.members[0].pid, signal.SIGKILL)
    assert called.wait(5.0) and isinstance(ranks.leader.failure, RankError)
    ranks.close()


def test_a_step_that_waits_for_ranks_that_live_ends_the_group() -> None:
    ranks, called = process_group(WAITS), threading.Event()
    leader = ranks.leader
    SetupCollectives(leader, b"", 1.5).abort_with(called.set)
    assert leader.step_limit_s == peers.LOADING_SECONDS
    leader.step_limit_s = 0.3
    with leader.in_step():
        pass
    assert not called.wait(0.5)  # no step is under way
    with leader.in_step():
        assert called.wait(5.0)
    with pytest.raises(RankError, match=r"step 0 did not end within 0\.3 s"):
        leader.check()
    ranks.close()


def test_what_a_rank_says_of_its_failure_is_passed_on() -> None:
    ranks = process_group("follower.fail('its weights are wrong'); " + EARLY)
    with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) its weights are wrong; its process r"):
        ranks.leader.receive(ranks.leader.members[0], 10)
    ranks.close()


def test_what_a_rank_refuses_is_said_as_a_user_s_error() -> None:
    ranks = process_group("follower.refuse('9 heads over 10 ranks'); " + EARLY)
    with pytest.raises(RankRefusedError, match=r"^rank 1: 9 heads over 10 ranks$") as caught:
        ranks.leader.receive(ranks.leader.members[0], 10)
    assert caught.value.exit_code == 2
    ranks.close()


def test_one_that_takes_a_call_and_says_nothing_is_not_called_a_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        where = Address("127.0.0.1", busy.getsockname()[1])
        said = r"did not answer rank 1 within 0\.2 s \(it took the call and said nothing"
        with pytest.raises(ConfigError, match=said):
            call(where, 1, b"right", seconds=0.2)


def test_a_rank_that_ends_at_its_start_is_said_to() -> None:
    code = ("-c", "raise SystemExit('broken')")
    with pytest.raises(RankError, match="rank 1 ended at its start: broken"):
        gather_here(2, code, limit_s=1.0)


def test_followers_end_when_rank_0_is_killed() -> None:
    code = (
        "import os, signal, sys, time\n"
        "sys.path.insert(0, '.')\n"
        "from tests.distributed.groups import JOINED, process_group\n"
        f"ranks = process_group({WAITS!r}, 3)\n"
        "print(*(member.pid for member in ranks.leader.members), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    pids = [int(each) for each in done.stdout.split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_a_follower_that_does_not_hear_is_ended_with_rank_0() -> None:
    code = "follower.ends_process = True\nimport time; time.sleep(60)\n"
    ranks = process_group(
        "from tilewright.distributed import group\ngroup.PATIENCE_SECONDS = 0.2\n" + code
    )
    (member,) = ranks.leader.members
    assert member.child is not None
    ranks.leader.end("rank 0 has enough")
    ended = member.child.wait(6)
    assert ended is not None and ended.code == RankError.exit_code
    ranks.close()


def test_a_stopped_rank_has_a_step_s_limit_while_models_are_loaded_too() -> None:
    with Child(("sleep", "60")) as child:
        assert overdue(9.0, 10.0, is_loading=False, pid=child.pid) is None
        assert overdue(11.0, 10.0, is_loading=False, pid=None) == 10.0
        assert overdue(11.0, 10.0, is_loading=True, pid=child.pid) is None
        os.kill(child.pid, signal.SIGSTOP)
        while not is_stopped(child.pid):
            time.sleep(0.01)
        assert overdue(9.0, 10.0, is_loading=True, pid=child.pid) is None
        assert overdue(11.0, 10.0, is_loading=True, pid=child.pid) == 10.0
        assert overdue(11.0, 10.0, is_loading=True, pid=None) is None
        longest = group.LOADING_SECONDS
        assert overdue(longest + 1, 10.0, is_loading=True, pid=None) == longest


def test_a_worker_ends_a_rank_that_was_stopped() -> None:
    with Child(("sleep", "60")) as child:
        os.kill(child.pid, signal.SIGSTOP)
        assert wait_for(child, 0.2).code == -signal.SIGKILL


@pytest.mark.parametrize("hears", [True, False])
def test_followers_end_when_rank_0_is_stopped_in_loading(hears: bool) -> None:
    """Whether they wait for it, or compute and receive nothing."""
    follower = (
        "from tilewright.distributed import group\n"
        "group.PATIENCE_SECONDS, group._BEAT_SECONDS = 0.2, 0.1\n"
        "follower.ends_process, follower.limit_s = True, 0.5\n"
        + ("follower.receive()" if hears else EARLY)
    )
    code = (
        "import os, signal, sys\n"
        "sys.path.insert(0, '.')\n"
        "from tests.distributed.groups import JOINED, process_group\n"
        f"print(process_group({follower!r}).leader.members[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and gone(int(first.stdout.readline()))
    finally:
        first.kill()
        first.wait()
