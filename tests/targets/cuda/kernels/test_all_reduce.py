"""all_reduce.cu: virtual ranks on streams of one GPU beside sums made one by one; two processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.targets.cuda.kernels.all_reduce_ranks import sums_of_two_processes
from tilewright.compiler.targets.cuda.collectives import all_reduce
from tilewright.compiler.targets.cuda.collectives.all_reduce import (
    EMPTY,
    MOST_BLOCKS,
    SLOTS,
    WIRES,
    AllReduceConfig,
    Failure,
    PeerAllReduce,
    shape_for,
)
from tilewright.compiler.targets.cuda.kernels.common import nvrtc

ROOT = Path(__file__).resolve().parents[4]
PART = 1 << 20


def test_nothing_touches_the_switches_of_nvlink() -> None:
    """Neither multimem instructions and operators nor multicast objects, anywhere."""
    forbidden = re.compile(r"multimem|cuMulticast|multicast_ptr|has_multicast|nvls_|NVLS_ENABLE=1")
    patterns = (
        "compiler/**/*.py",
        "tilewright/**/*.py",
        "compiler/**/*.cu*",
        "bench/**/*.py",
        "demo/**/*.py",
    )
    files = [each for pattern in patterns for each in ROOT.glob(pattern)]
    assert len(files) > 100
    assert not [str(each) for each in files if forbidden.search(each.read_text())]


@pytest.mark.parametrize("width", [64, 2048, 4096, 5120, 8192, 14336])
@pytest.mark.parametrize("wire", WIRES)
def test_a_shape_covers_a_row(width: int, wire: str) -> None:
    shape = shape_for(width, wire)
    words = width // (4 if wire == "fp32" else 8)
    assert shape.num_threads * shape.units * shape.num_blocks >= words
    assert shape.num_threads % 32 == 0 and shape.num_threads <= 512


class Virtual:
    """Ranks in one process, each on a stream of the one GPU."""

    def __init__(self, count: int, *, limit: float = 5.0) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        nvrtc.load(device, all_reduce.SOURCE)
        words = SLOTS * count * PART // 4
        self.memory = torch.full((count, words), EMPTY - 2**32, dtype=torch.int32, device=device)
        addresses = [each.data_ptr() for each in self.memory]
        most = MOST_BLOCKS // count  # all of them together have a multiprocessor each
        self.ranks = [
            PeerAllReduce(addresses, rank, part_bytes=PART, device=device, most_blocks=most)
            for rank in range(count)
        ]
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]
        for each in self.ranks:
            each.set_limit(limit)
        torch.cuda.synchronize()

    def __iter__(self) -> Iterator[tuple[int, PeerAllReduce]]:
        """Each rank, its stream being the current one."""
        for rank, (each, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                yield rank, each

    def check(self) -> None:
        torch.cuda.synchronize()
        assert [each.failure() for each in self.ranks] == [None] * len(self.ranks)


def tree(parts: list[Tensor]) -> Tensor:
    """Pairs of neighbours, then pairs of those."""
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("wire", WIRES)
def test_sums_residual_and_norm_are_those_of_any_number_of_rows(wire: str, count: int) -> None:
    """Steps of changing sizes one after another, which is what fills slots again."""
    group = Virtual(count)
    width, eps = 1024, 1e-5
    norm = torch.randn(width, device="cuda")
    for rows in (1, 5, 2, 70, 1, 1):
        xs = [torch.randn(rows, width, device="cuda") for _ in range(count)]
        xs[0][0, :8], xs[-1][0, 4:8] = -0.0, -0.0  # what stands for nothing
        first = torch.randn(rows, width, device="cuda")
        streams = [first.clone() for _ in range(count)]
        outs = [torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda") for _ in xs]
        torch.cuda.synchronize()
        for rank, each in group:
            for _ in range(2):
                each.all_reduce_add(
                    xs[rank], streams[rank], wire=wire, out=outs[rank], norm=norm, eps=eps
                )
            each.end_step()
        group.check()
        total = tree([x if wire == "fp32" else x.bfloat16().float() for x in xs])
        wanted = (total + first) + total
        assert all(torch.equal(each, streams[0]) for each in streams)
        assert torch.equal(streams[0], wanted)
        scale = torch.rsqrt(wanted.double().square().mean(-1, keepdim=True) + eps)
        torch.testing.assert_close(
            outs[0].double(), wanted.double() * scale * norm, rtol=2**-7, atol=1e-6
        )
        assert all(torch.equal(each, outs[0]) for each in outs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        AllReduceConfig(512),
        AllReduceConfig(256, 2),
        AllReduceConfig(128, 4),
        AllReduceConfig(128, 2, 2),
        AllReduceConfig(64, 1, 8),
    ],
)
def test_launch_shapes_give_one_sum(shape: AllReduceConfig) -> None:
    group = Virtual(2)
    xs, streams = torch.randn(2, 3, 2048, device="cuda"), torch.zeros(2, 3, 2048, device="cuda")
    outs, norm = torch.zeros_like(streams), torch.ones(2048, device="cuda")
    torch.cuda.synchronize()
    for rank, each in group:
        to = {"out": outs[rank], "norm": norm, "eps": 1e-5}
        each.all_reduce_add(xs[rank], streams[rank], wire="fp32", shape=shape, **to)  # type: ignore[arg-type]
        each.end_step()
    group.check()
    assert torch.equal(streams[1], xs[0] + xs[1])
    wanted = torch.nn.functional.rms_norm(streams[0], (2048,), eps=1e-5)
    torch.testing.assert_close(outs[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2048, 4096 * 12, 1 << 19])
def test_bfloat16_is_summed_in_fp32_and_rounded_once(size: int) -> None:
    group = Virtual(2)
    xs = torch.randn(2, size, device="cuda").bfloat16()
    outs = torch.zeros_like(xs)
    torch.cuda.synchronize()
    for rank, each in group:
        each.all_reduce(outs[rank], xs[rank], wire="bf16")
        each.end_step()
    group.check()
    wanted = tree([x.float() for x in xs]).bfloat16()
    assert all(torch.equal(each, wanted) for each in outs)


@pytest.mark.gpu
def test_the_best_key_of_all_ranks_is_chosen_by_all() -> None:
    from tilewright.compiler.targets.cuda.kernels.sampling.argmax import choose, num_keys

    group, rows, width = Virtual(2), 9, 3000
    logits = torch.randn(rows, 2 * width, device="cuda").half().float()  # equal ones too
    logits[1], logits[2, 4000], logits[3, 5] = 1.0, float("nan"), float("inf")
    ends = torch.full((rows, 4), -1, device="cuda")
    ends[0, 2] = logits[0].argmax()
    wanted, why = (
        torch.zeros(rows, dtype=torch.int64, device="cuda"),
        torch.zeros(rows, dtype=torch.uint8, device="cuda"),
    )
    scratch = torch.zeros(rows, num_keys(2 * width), dtype=torch.int64, device="cuda")
    choose(wanted, why, logits, end_tokens=ends, scratch=scratch)
    found = [torch.zeros_like(wanted) for _ in range(2)]
    found_why = [torch.zeros_like(why) for _ in range(2)]
    positions = [torch.arange(-1, rows - 1, device="cuda") for _ in range(2)]
    keys = []
    for rank in range(2):
        part = logits[:, rank * width : (rank + 1) * width]
        keys.append(torch.zeros(rows, num_keys(width), dtype=torch.int64, device="cuda"))
        choose(found[rank], found_why[rank], part, end_tokens=ends, scratch=keys[rank])
    torch.cuda.synchronize()
    for rank, each in group:
        each.choose_best(
            found[rank],
            found_why[rank],
            keys[rank],
            end_tokens=ends,
            first_column=rank * width,
            positions=positions[rank],
        )
        each.end_step()
    group.check()
    for rank in range(2):
        assert torch.equal(found[rank], wanted) and torch.equal(found_why[rank], why)
        assert positions[rank].tolist() == [-1, *range(1, rows)]


@pytest.mark.gpu
def test_values_are_delivered_to_those_who_want_them() -> None:
    group = Virtual(3)
    xs = torch.randn(3, 5, 64, device="cuda")
    outs = torch.zeros(3, 3, 5, 64, device="cuda")
    torch.cuda.synchronize()
    for rank, each in group:
        each.deliver(outs[rank], xs[rank], senders=0b111, receivers=0b001)
        each.end_step()
    group.check()
    assert torch.equal(outs[0], xs) and not outs[1:].any()
    for rank, each in group:
        each.deliver(outs[rank], xs[rank], senders=0b001, receivers=0b111)
        each.end_step()
    group.check()
    assert all(torch.equal(each[0], xs[0]) for each in outs) and not outs[1, 1:].any()


@pytest.mark.gpu
def test_a_captured_step_is_right_at_every_replay_beside_eager_ones() -> None:
    group = Virtual(2)
    xs = torch.randn(2, 4, 512, device="cuda")
    streams, graphs = torch.zeros(2, 4, 512, device="cuda"), []

    def step(rank: int, each: PeerAllReduce) -> None:
        for _ in range(5):
            each.all_reduce_add(xs[rank], streams[rank], wire="fp32")
        each.end_step()

    torch.cuda.synchronize()
    for rank, each in group:
        step(rank, each)
    group.check()
    for rank, each in enumerate(group.ranks):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=group.streams[rank]):
            step(rank, each)
    for turn in range(8):
        for rank, each in group:
            graphs[rank].replay()
            if turn % 3 == 1:
                step(rank, each)
        group.check()
    wanted = torch.zeros(4, 512, device="cuda")
    for _ in range(5 * (1 + 8 + 3)):
        wanted += xs[0] + xs[1]
    assert torch.equal(streams[0], wanted) and torch.equal(streams[1], wanted)


@pytest.mark.gpu
def test_a_rank_that_never_comes_is_named_and_later_polls_end() -> None:
    group = Virtual(2, limit=0.05)
    x, stream = torch.randn(1, 512, device="cuda"), torch.zeros(1, 512, device="cuda")
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(group.streams[0]):
        begin.record()
        for _ in range(50):
            group.ranks[0].all_reduce_add(x, stream, wire="fp32")
        end.record()
    end.synchronize()
    assert group.ranks[0].failure() == Failure(rank=0, peer=1, index=0)
    assert 50 <= begin.elapsed_time(end) < 500


@pytest.mark.multigpu
def test_two_processes_sum_alike() -> None:
    found = sums_of_two_processes(20)
    assert len(found) > 20 and all(found.values())
