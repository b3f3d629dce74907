"""Steps of several ranks: sent as bytes, followed, and the same as one rank's."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tests.distributed.groups import thread_group
from tests.targets.random_operations import random_operations
from tests.tiny import compiled, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ops.collectives import all_gather_group, all_reduce_group
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    CopyState,
    DropSwapped,
    LoadState,
    OpenSlot,
    PrefillChunk,
    SaveState,
    Slot,
    StateSnapshot,
    Step,
    SwapHandle,
    SwapIn,
    SwapOut,
)
from tilewright.compiler.targets.interface.step_bytes import read_step, step_bytes
from tilewright.compiler.targets.null import NullExecutable
from tilewright.compiler.targets.ranks.gathered_values import RankInterpreter, SocketAllGather
from tilewright.compiler.targets.ranks.rank_check import steps_between
from tilewright.compiler.targets.ranks.sharded import ShardedExecutable, meet, serve_steps
from tilewright.distributed.channel import ChannelClosedError
from tilewright.distributed.group import Follower
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import ConfigError, ExchangeError, RankError
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.runtime.service import EngineService, QueueTransport

S = [Slot(number) for number in range(5)]


def test_every_kind_of_edit_survives_the_way() -> None:
    choosing = SamplingParams(
        temperature=0.5, logit_bias=((3, 1.5),), seed=-1, stop_token_ids=(2, 0)
    )
    edits = (
        *(OpenSlot(S[1], choosing, (1, 2), keeps=1), CloseSlot(S[2]), AssignPages(S[1], 1, (7, 8))),
        *(
            SaveState(S[0], StateSnapshot(3)),
            LoadState(S[0], StateSnapshot(3)),
            CopyState(S[0], S[1], 5),
        ),
        *(SwapOut(S[0], SwapHandle(1)), SwapIn(S[0], SwapHandle(1)), DropSwapped(SwapHandle(1))),
    )
    chunk = PrefillChunk(S[3], 4, (5, 6), True, ((5, StateSnapshot(1)),), echoes=True, also=(S[4],))
    step = Step((S[0],), (chunk,), edits, {S[0]: 9}, masked=True, logprobs=3, want_logits=True)
    assert read_step(step_bytes(step)) == step
    assert read_step(step_bytes(Step())) == Step()


def _null(model: Any, max_batch: int) -> NullExecutable:
    executable = compiled(model, "null", max_batch=max_batch)
    assert isinstance(executable, NullExecutable)
    return executable


def test_followers_make_the_steps_of_rank_0(tmp_path: Path) -> None:
    model = tiny_model(num_layers=1)
    own, *others = (_null(model, 8 - rank) for rank in range(3))

    def follow(follower: Follower, token: bytes) -> None:
        executable = others[follower.rank - 1]
        meet(executable, SetupCollectives(follower, token, 5.0))
        serve_steps(executable, follower)

    with thread_group(tmp_path, 3, follow) as (leader, ranks):
        meet(own, SetupCollectives(leader, ranks.token, 5.0))
        executable = ShardedExecutable(own, ranks)
        assert executable.capabilities.max_num_seqs == 6  # the least of all ranks
        assert executable.mesh == "1x3" and own.mesh == "1x1"  # what results say
        loop = EngineLoop(executable)
        loop.warm_up()
        sampling = [SamplingParams(max_tokens=9, temperature=t) for t in (0.0, 0.7, 0.0, 1.0)]
        requests = [RequestState(i, (1, 2, 3 + i), each) for i, each in enumerate(sampling)]
        loop.generate(requests)
        assert [len(each.output) for each in requests] == [9] * 4
    for each in others:
        assert each.num_steps == own.num_steps > 9
        slots = set(own._slot_states)
        assert {s: each.length(s) for s in slots} == {s: own.length(s) for s in slots}


def test_ranks_share_the_passes_that_the_least_of_them_has(tmp_path: Path) -> None:
    """One with less memory has smaller ones; all capture the same."""
    own, other = (_null(tiny_model(num_layers=1), 2) for _ in range(2))
    sizes = {own: (64, 2048, 8192), other: (64, 2048)}
    for each, found in sizes.items():
        passes = (4, found[:1]), (8, found)
        each.capabilities = replace(each.capabilities, passes=passes, most_shared=found[-1])

    def follow(follower: Follower, token: bytes) -> None:
        meet(other, SetupCollectives(follower, token, 5.0))

    with thread_group(tmp_path, 2, follow) as (leader, ranks):
        meet(own, SetupCollectives(leader, ranks.token, 5.0))
    assert own.capabilities == other.capabilities
    assert own.capabilities.passes == ((4, (64,)), (8, (64, 2048)))
    assert own.capabilities.most_shared == 2048 and not other.notes
    (note,) = own.notes
    assert note == "ranks share passes of up to 2,048 tokens of prompts, as the least of them does"


def test_ranks_that_part_are_found_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every eight steps: rank 1 loses count of a position and is named."""
    monkeypatch.setenv("TILEWRIGHT_CHECK_RANKS", "8")
    own, other = (_null(tiny_model(num_layers=1), 2) for _ in range(2))

    def follow(follower: Follower, token: bytes) -> None:
        meet(other, SetupCollectives(follower, token, 5.0))
        with pytest.raises((RankError, ChannelClosedError)):
            serve_steps(other, follower)

    with thread_group(tmp_path, 2, follow) as (leader, ranks):
        meet(own, SetupCollectives(leader, ranks.token, 5.0))
        executable = ShardedExecutable(own, ranks)
        opened = OpenSlot(S[0], SamplingParams())
        executable.step(
            Step(edits=(opened,), prompts=(PrefillChunk(S[0], 0, (1, 2), chooses=True),))
        )
        for _ in range(20):
            executable.step(Step(decode=(S[0],)))
        other._slot_states[S[0]].length += 1
        message = r"rank 1 .*is at 24 steps \w+, slots \w+; rank 0 is at 24 steps \w+, slots \w+"
        for _ in range(3):
            executable.step(Step(decode=(S[0],)))
        with pytest.raises(RankError, match=message):
            executable.step(Step(decode=(S[0],)))


def test_how_often_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, steps in (("", 0), ("0", 0), ("1", 64), ("8", 8)):
        monkeypatch.setenv("TILEWRIGHT_CHECK_RANKS", text)
        assert steps_between() == steps
    monkeypatch.setenv("TILEWRIGHT_CHECK_RANKS", "yes")
    with pytest.raises(ConfigError, match=r"TILEWRIGHT_CHECK_RANKS is 'yes'; allowed: 0, 1 \("):
        steps_between()


@pytest.mark.slow
def test_a_hundred_thousand_operations_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, are cancelled and go on in any order, and every 64 steps ranks compare."""
    monkeypatch.setenv("TILEWRIGHT_CHECK_RANKS", "1")
    model = tiny_model(num_layers=1)
    own, other = (_null(model, 6) for _ in range(2))

    def follow(follower: Follower, token: bytes) -> None:
        meet(other, SetupCollectives(follower, token, 10.0))
        serve_steps(other, follower)

    with thread_group(tmp_path, 2, follow) as (leader, ranks):
        meet(own, SetupCollectives(leader, ranks.token, 10.0))
        random_operations(EngineLoop(ShardedExecutable(own, ranks)), 100_000)
    assert other.num_steps == own.num_steps > 10_000


def test_a_step_that_fails_on_one_rank_ends_the_group(tmp_path: Path) -> None:
    own, other = (_null(tiny_model(num_layers=1), 1) for _ in range(2))

    def follow(follower: Follower, token: bytes) -> None:
        meet(other, SetupCollectives(follower, token, 5.0))
        with pytest.raises(AssertionError, match="leaves a gap"):
            serve_steps(other, follower)

    with thread_group(tmp_path, 2, follow) as (leader, ranks):
        meet(own, SetupCollectives(leader, ranks.token, 5.0))
        executable = ShardedExecutable(own, ranks)
        service = EngineService(executable, QueueTransport())
        with pytest.raises(AssertionError, match="leaves a gap"):
            executable.step(
                Step(
                    edits=(OpenSlot(S[0], SamplingParams()),),
                    prompts=(PrefillChunk(S[0], 5, (1,)),),
                )
            )
        with pytest.raises(RankError, match=r"rank 0 failed in step|rank 1 .* failed in step"):
            executable.step(Step())
        with pytest.raises(RankError):  # though nobody asks anything
            service.turn()


def _rank_graph() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(ops.all_reduce.overload, (x, 3, "bf16"))
    side = graph.call_function(ops.all_gather.overload, (x, [2, 2, 2], 0))
    graph.output((total, side))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_collectives_between_sockets_are_those_of_ranks_in_one_process(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 70_000, generator=generator) for _ in range(3)]
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(peers: SetupCollectives) -> None:
        exchange = SocketAllGather.of(peers)
        found[peers.rank] = RankInterpreter(_rank_graph(), exchange).run(values[peers.rank])
        exchange.close()

    def follow(follower: Follower, token: bytes) -> None:
        run(SetupCollectives(follower, token, 10.0))
        follower.receive()

    with thread_group(tmp_path, 3, follow) as (leader, ranks):
        run(SetupCollectives(leader, ranks.token, 10.0))
    for rank in range(3):
        total, side = found[rank]
        assert torch.equal(total, all_reduce_group(values, "bf16")[rank])
        assert torch.equal(side, all_gather_group(values, [2, 2, 2], 0)[rank])


def test_a_rank_that_takes_no_part_is_named_with_the_exchange(tmp_path: Path) -> None:
    ends = threading.Event()

    def follow(follower: Follower, token: bytes) -> None:
        exchange = SocketAllGather.of(SetupCollectives(follower, token, 5.0))
        exchange.all_gather(b"x")
        ends.wait(10)
        exchange.close()
        follower.receive()

    with thread_group(tmp_path, 2, follow) as (leader, ranks):
        exchange = SocketAllGather.of(SetupCollectives(leader, ranks.token, 0.2))
        assert exchange.all_gather(b"yz") == [b"yz", b"x"]
        said = r"did not answer exchange 2 within 0\.2 s"
        with pytest.raises(ExchangeError, match=said) as error:
            exchange.all_gather(b"")
        assert error.value.rank == 1
        assert error.value.of_step(7) == "did not answer exchange 2 of step 7 within 0.2 s"
        ends.set()
        with pytest.raises(ExchangeError, match="left before exchange 3"):
            exchange.all_gather(b"")
