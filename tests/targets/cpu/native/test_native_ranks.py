"""Ranks on the native cpu backend: the sums of the references, one rank's text, a named failure."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.groups import thread_group
from tests.draft_layers import attach, tiny_layer
from tests.models.test_qwen3_5 import ON_CUDA
from tests.tiny import precision_of, prefill, tiny_model
from tilewright.compiler.driver import compile_model
from tilewright.compiler.ops.collectives import all_reduce_group
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.cpu.native.ranks import NativeRank
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.ranks.sharded import ShardedExecutable, meet, serve_steps
from tilewright.distributed.channel import ChannelClosedError
from tilewright.distributed.group import END, Follower
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import RankError
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import MTP, SpeculativeConfig

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

SHAPE = {"hidden_size": 64, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 200}


def options(count: int, rank: int = 0, wire: str | None = None) -> CompileOptions:
    parallel = (
        SINGLE_RANK if count == 1 else ParallelConfig(tensor=count, wire=wire, peer_limit=5.0)
    )
    return CompileOptions(
        max_batch=4, compute="exact", num_threads=1, parallel=parallel, rank=rank, max_context=128
    )


def native(count: int, rank: int = 0, **changes: Any) -> Executable:
    model = tiny_model(std=0.3, **{**SHAPE, **changes})
    given = options(count, rank)
    return compile_model(model, precision_of(), target="cpu-native", options=given).executable


@contextlib.contextmanager
def nodes(folder: Path, count: int, **changes: Any) -> Iterator[Executable]:
    """An executable over so many ranks, the followers in threads."""
    ranks = [native(count, rank, **changes) for rank in range(count)]

    def follow(follower: Follower, token: bytes) -> None:
        own = ranks[follower.rank]
        meet(own, SetupCollectives(follower, token, 5.0))
        serve_steps(own, follower)
        own.close()

    with thread_group(folder, count, follow) as (leader, group):
        meet(ranks[0], SetupCollectives(leader, group.token, 5.0))
        yield ShardedExecutable(ranks[0], group)


def tokens(count: int) -> tuple[int, ...]:
    return tuple(random.Random(count).choices(range(200), k=count))


@pytest.mark.parametrize("kind", ["", "hybrid"])
def test_ranks_verify_drafts(kind: str, tmp_path: Path) -> None:
    changes = {"model_type": "qwen3_5", **ON_CUDA, "vocab_size": 200} if kind else {}
    config = SpeculativeConfig(max_lookup=1, min_lookup=1, schedule=((1, 9, 5),))
    policy = SchedulerConfig(speculative=config)
    with nodes(tmp_path, 2, **changes) as executable:
        plain, drafted = EngineLoop(executable), EngineLoop(executable, policy=policy)
        outputs = []
        for loop in (plain, drafted):
            executable.reset()
            made = [
                RequestState(i, tokens(9 + i) * 2, SamplingParams(max_tokens=30, temperature=heat))
                for i, heat in enumerate((0.0, 0.3, 0.0))
            ]
            loop.generate(made)
            outputs.append([request.output for request in made])
        counts = drafted.scheduler.speculator.counts
        assert outputs[0] == outputs[1]
        assert 0 < sum(counts.num_accepted) < counts.num_draft_tokens


def test_the_leader_drafts_with_a_whole_layer(tmp_path: Path) -> None:
    """Its hidden states are those of a single rank. Followers verify."""
    changes: dict[str, Any] = {"model_type": "qwen3_5", **ON_CUDA, "vocab_size": 200}
    model = tiny_model(std=0.3, **{**SHAPE, **changes})
    layer, outputs = tiny_layer(model), []
    config = SpeculativeConfig(method=MTP, max_drafts=3, schedule=((1, 9, 3),))
    single: Any = native(1, **changes)
    with nodes(tmp_path, 2, **changes) as given:
        several: Any = given
        for leader in (single, several.own):
            attach(leader, model, layer, "cpu-native")
        several.capabilities = several.own.capabilities
        for executable, speculative in ((single, None), (single, config), (several, config)):
            loop = EngineLoop(executable, policy=SchedulerConfig(speculative=speculative))
            request = RequestState(0, tokens(9), SamplingParams(max_tokens=12))
            loop.generate([request])
            outputs.append((request.output, request.num_draft_tokens))
    plain, drafted, sharded = outputs
    assert sharded == drafted and plain[0] == drafted[0] and drafted[1]
    single.close()


def answers(executable: Executable) -> list[list[int]]:
    """What requests of several kinds give: greedy ones, and those that need whole rows."""
    greedy: dict[str, Any] = {}
    kinds = [greedy, {"temperature": 0.8, "seed": 3}, greedy, {"repetition_penalty": 1.3}, greedy]
    requests = [
        RequestState(i, tokens(9 + i), SamplingParams(max_tokens=12, **each))
        for i, each in enumerate(kinds)
    ]
    EngineLoop(executable).generate(requests)
    return [list(request.output) for request in requests]


@pytest.fixture(scope="module")
def alone() -> tuple[list[list[int]], torch.Tensor]:
    executable = native(1)
    found = answers(executable)
    executable.reset()
    return found, prefill(executable, list(tokens(40)))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_number_of_nodes_says_the_same_in_fp32(
    tmp_path: Path, count: int, alone: tuple[list[list[int]], torch.Tensor]
) -> None:
    with nodes(tmp_path, count) as executable:
        assert answers(executable) == alone[0]
        executable.reset()
        logits = prefill(executable, list(tokens(40)))
        assert torch.allclose(logits, alone[1], atol=2e-5)


def test_a_vocabulary_too_small_to_deal_is_whole_on_every_rank(tmp_path: Path) -> None:
    prompt = [token % 40 for token in tokens(12)]
    alone = prefill(native(1, vocab_size=40), prompt)
    with nodes(tmp_path, 4, vocab_size=40) as executable:
        assert torch.allclose(prefill(executable, prompt), alone, atol=2e-5)
        executable.reset()
        request = RequestState(0, tuple(prompt), SamplingParams(max_tokens=1))
        EngineLoop(executable).generate([request])
        assert request.output == [int(alone[-1].argmax())]


@pytest.mark.parametrize(("count", "wire"), [(2, "bf16"), (3, "fp32"), (3, "bf16"), (4, "q80")])
def test_sums_have_the_references_bits_in_one_hop_and_in_two(
    tmp_path: Path, count: int, wire: str
) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(7, 64, generator=generator) * 10**rank for rank in range(count)]
    parts[0][3] = 0.0
    ranks = [native(count, rank) for rank in range(count)]
    found: dict[int, list[torch.Tensor]] = {}

    def add(rank: int, peers: SetupCollectives) -> None:
        own = ranks[rank]
        assert isinstance(own, NativeRank)
        own.join(peers)
        found[rank] = []
        for first_bytes in (0, 1 << 40):
            own.set_hops(first_bytes)
            values = parts[rank].clone()
            own.all_reduce(values.numpy(), wire)
            found[rank].append(values)

    def follow(follower: Follower, token: bytes) -> None:
        add(follower.rank, SetupCollectives(follower, token, 5.0))
        follower.receive()

    with thread_group(tmp_path, count, follow) as (leader, group):
        add(0, SetupCollectives(leader, group.token, 5.0))
    expected = all_reduce_group(parts, wire, hops=1 if count == 2 else 2)
    for sums in found.values():
        assert all(torch.equal(each, expected[0]) for each in sums)


@pytest.mark.parametrize(("seconds", "said"), [(1.2, "two hops"), (1.3, "one hop")])
def test_half_of_the_bytes_are_worth_a_quarter_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, said: str
) -> None:
    def trial(own: NativeRank, rows: int, width: int, wire: str, two_hops_from: int) -> float:
        return 1.0 if two_hops_from else seconds

    monkeypatch.setattr(NativeRank, "_trial", trial)
    with nodes(tmp_path, 4) as executable:
        assert executable.device_detail.endswith(f", 4 ranks, fp32 in {said}")


def test_a_greedy_step_sends_no_logits(tmp_path: Path) -> None:
    sent = []
    for asked in ({}, {"temperature": 1.0}):
        ranks = [native(2, rank) for rank in range(2)]

        def follow(follower: Follower, token: bytes, own: Executable = ranks[1]) -> None:
            meet(own, SetupCollectives(follower, token, 5.0))
            serve_steps(own, follower)

        folder = tmp_path / str(len(asked))
        folder.mkdir()
        with thread_group(folder, 2, follow) as (leader, group):
            meet(ranks[0], SetupCollectives(leader, group.token, 5.0))
            sampling = SamplingParams(max_tokens=11, **asked)
            EngineLoop(ShardedExecutable(ranks[0], group)).generate(
                [RequestState(0, (1,), sampling)]
            )
        assert isinstance(ranks[1], NativeRank)
        sent.append(ranks[1].exchanged().num_bytes)
        ranks[1].close()
    assert sent[1] - sent[0] == 11 * (4 * 88 - 8)  # its logits, or its best key


def test_a_rank_that_goes_in_the_middle_of_an_answer_is_named(tmp_path: Path) -> None:
    ranks = [native(2, rank) for rank in range(2)]

    def follow(follower: Follower, token: bytes) -> None:
        meet(ranks[1], SetupCollectives(follower, token, 5.0))
        follower.receive()
        ranks[1].close()  # its sockets too
        with contextlib.suppress(ChannelClosedError):
            while follower.receive().kind != END:
                pass

    with thread_group(tmp_path, 2, follow) as (leader, group):
        meet(ranks[0], SetupCollectives(leader, group.token, 5.0))
        executable = ShardedExecutable(ranks[0], group)
        loop = EngineLoop(executable)
        with pytest.raises(RankError, match=r"rank 1 .*left before exchange \d+ of step \d+$"):
            loop.generate([RequestState(0, (1, 2, 3), SamplingParams(max_tokens=10))])
        with pytest.raises(RankError, match="rank 1"):
            executable.reset()
