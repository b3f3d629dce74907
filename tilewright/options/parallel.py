"""The options of a model that is spread over ranks, on one machine or several."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from tilewright.distributed.parallel import EXCHANGES, WIRES
from tilewright.options.arguments import integer, option, real

_GROUP = "several devices"
_MOST_RANKS = 1024


def numbers(text: str) -> tuple[int, ...]:
    """A type for ``add_argument``: whole numbers with commas between them."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole numbers, as 0,1") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArguments:
    """How a model is spread, as asked; None where nothing was said."""

    tensor_parallel: int | None = option(
        "ranks, each with a part of every layer: GPUs of target cuda, processes of target cpu "
        "(default: 1)",
        "--tensor-parallel",
        "--tensor-parallel-size",
        "--nodes",
        group=_GROUP,
        type=integer(1, _MOST_RANKS),
        metavar="N",
    )
    expert_parallel: int | None = option(
        "of how many parts each holds whole experts of its own (default: as few as leave every "
        "expert's width in pieces of 128)",
        group=_GROUP,
        type=integer(1, _MOST_RANKS),
        metavar="E",
    )
    devices: tuple[int, ...] | None = option(
        "the ranks' devices, as 0,1 (default: from 0 on)",
        group=_GROUP,
        type=numbers,
        metavar="LIST",
    )
    shares: tuple[int, ...] | None = option(
        "what of the model each rank holds, in proportion, as 2,1,1 (default: even)",
        group=_GROUP,
        type=numbers,
        metavar="LIST",
    )
    wire: str | None = option(
        "the format of partial sums on their way (default: the target's)",
        group=_GROUP,
        choices=WIRES,
    )
    exchange: str | None = option(
        "how GPUs exchange: through each other's memory, or through NCCL (default: the former "
        "where they reach it)",
        group=_GROUP,
        choices=EXCHANGES,
    )
    peer_limit: float | None = option(
        "seconds after which a rank that does not answer ends the run (default: 10)",
        group=_GROUP,
        type=real(0, 1e6, above=True),
        metavar="S",
    )
    nnodes: int | None = option(
        "machines of the group; every one starts its own ranks (default: 1)",
        group=_GROUP,
        type=integer(1, _MOST_RANKS),
        metavar="N",
    )
    node_rank: int | None = option(
        "of this machine, 0 to N - 1", group=_GROUP, type=integer(0, _MOST_RANKS), metavar="R"
    )
    master_addr: str | None = option(
        "the address of machine 0, where ranks meet; all need TILEWRIGHT_TOKEN",
        group=_GROUP,
        metavar="HOST",
    )
    master_port: int | None = option(
        "its port (default: 29500)", group=_GROUP, type=integer(1, 65535), metavar="PORT"
    )
