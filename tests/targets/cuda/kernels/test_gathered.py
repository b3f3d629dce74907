"""Sums of what a library gathers: gloo between threads, and the kernels of peers emulated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.targets.cuda import emulated_all_reduce
from tilewright.compiler.ops.collectives import all_reduce_group
from tilewright.compiler.targets.cuda.collectives.all_reduce import WIRES
from tilewright.compiler.targets.cuda.collectives.gathered import GatheredExchange
from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.errors import ExchangeError

T = TypeVar("T")
CPU = torch.device("cpu")
PART = 1 << 12


class Gloo:
    """A rank of a group in threads."""

    has_ended = False

    def __init__(self, store: dist.Store, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._group = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=60))

    def all_gather(self, parts: Tensor) -> None:
        words = parts.view(self.count, -1).view(torch.uint8)
        self._group.allgather([list(words)], [words[self.rank].clone()]).wait()


def ranks(count: int, run: Callable[[GatheredExchange], T]) -> list[T]:
    """What each of so many ranks makes of its exchange."""
    store, found = dist.HashStore(), list[Any]([None] * count)
    connected = threading.Barrier(count)  # a rank that ends sooner would take its connections along

    def one(rank: int) -> None:
        library = Gloo(store, rank, count)
        connected.wait(timeout=60)
        found[rank] = run(GatheredExchange(library, part_bytes=PART, device=CPU))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(each is not None for each in found)
    return found


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "launch", emulated_all_reduce.launch)


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize(
    ("count", "wire"),
    [(2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16"), (9, "fp32"), (9, "bf16")],
)
def test_sums_are_in_rank_order_and_of_any_number_of_rows(count: int, wire: str) -> None:
    """Nine ranks are more than the kernels know; 40 rows are more than a part holds."""
    width, norm = 64, seeded(64, seed=99)
    for rows in (1, 40):
        xs = [seeded(rows, 2 * width, seed=each)[:, :width] for each in range(count)]
        for each in xs:
            each[0, :8] = torch.tensor([0.0, -0.0]).repeat(4)  # nothing, between peers
        first = seeded(rows, width, seed=50)

        def run(exchange: GatheredExchange, xs: Any = xs, first: Tensor = first) -> Any:
            x, stream = xs[exchange.rank], first.clone()
            out = torch.empty_like(first, dtype=torch.bfloat16)
            total = torch.empty_like(first)
            for _ in range(2):
                exchange.all_reduce_add(x, stream, wire=wire, out=out, norm=norm, eps=1e-5)
            exchange.all_reduce(total, x.contiguous(), wire=wire)
            exchange.end_step()
            assert exchange.failure() is None
            return stream, out, total

        found = ranks(count, run)
        total = all_reduce_group([each + 0.0 for each in xs], wire)[0]
        stream = (total + first) + total
        normed = torch.nn.functional.rms_norm(stream, (width,), norm, 1e-5).bfloat16()
        for each in found:
            assert same_bits(each[0], stream) and torch.equal(each[1], normed)
            assert same_bits(each[2], total)


def test_values_that_are_bfloat16_already_are_sent_as_they_are() -> None:
    xs = [seeded(96, seed=each).bfloat16() for each in range(3)]

    def run(exchange: GatheredExchange) -> Tensor:
        out = torch.empty_like(xs[0])
        exchange.all_reduce(out, xs[exchange.rank], wire="bf16")
        return out

    wanted = ((xs[0].float() + xs[1].float()) + xs[2].float()).bfloat16()
    assert all(torch.equal(each, wanted) for each in ranks(3, run))


@pytest.mark.parametrize("count", [3, 9])
def test_the_likeliest_token_is_that_of_whole_rows(count: int) -> None:
    """The first of equal ones; a rank may have no columns that are chosen from."""
    width = 8 * (count - 1)
    logits = seeded(5, width, seed=1)
    logits[1, 3] = logits[1, 12] = 9.0
    logits[2, 9], logits[3] = float("nan"), -5.0
    ends = torch.full((5, 2), -1)
    ends[1, 1] = 3

    def run(exchange: GatheredExchange) -> Any:
        first = 8 * exchange.rank
        own = logits[:, first : first + 8]
        order = torch.where(own == 0, 0.0, own).view(torch.int32)
        order = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
        order = torch.where(own == own, order, 2**31 - 1).long()
        keys = order << 32 | 0xFFFFFFFF - torch.arange(own.shape[1])
        tokens, why = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.uint8)
        positions = torch.tensor([4, -1, 0, 7, 8])
        exchange.choose_best(
            tokens, why, keys, end_tokens=ends, first_column=first, positions=positions
        )
        return tokens, why, positions

    for tokens, why, positions in ranks(count, run):
        assert tokens.tolist() == [int(logits[0].argmax()), 3, 9, 0, int(logits[4].argmax())]
        assert why.tolist() == [0, 1, 2, 0, 0] and positions.tolist() == [5, -1, 1, 8, 9]


def test_whole_logits_come_to_rank_0_and_its_tokens_to_all() -> None:
    sizes, whole = (3, 5, 4), seeded(2, 12, seed=3)

    def run(exchange: GatheredExchange) -> Any:
        group = RankGroup(exchange, sizes)
        own = whole[:, group.first : group.first + sizes[group.rank]]
        found = group.whole(own)
        tokens, why = torch.tensor([7 + group.rank, 9]), torch.tensor([group.rank, 2]).byte()
        group.share(tokens, why)
        return found, tokens, why

    every = ranks(3, run)
    assert torch.equal(every[0][0], whole)
    for _, tokens, why in every:
        assert tokens.tolist() == [7, 9] and why.tolist() == [0, 2]


def test_after_the_library_s_end_nothing_is_believed() -> None:
    def run(exchange: GatheredExchange) -> bool:
        group = RankGroup(exchange, ())
        group.check()
        exchange._gathering.has_ended = True
        with pytest.raises(ExchangeError):
            group.check()
        return True

    assert ranks(2, run) == [True, True]


def test_every_wire_is_known() -> None:
    assert set(WIRES) == set(emulated_all_reduce.KINDS)
