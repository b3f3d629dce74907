"""all_reduce.cu on memory of the host, for ranks whose peers' parts are there before a launch.

It reads and writes at the addresses that a launch is given, as the kernels do: what they send, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.ops.collectives import tree_sum
from tilewright.compiler.targets.cuda.collectives.all_reduce import EMPTY

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def launch(source: object, name: str, *, at: object, arguments: Any, spread: bool = False) -> None:
    """In the place of `nvrtc.launch`."""
    assert arguments.group.index == 0, "there is one slot"
    if name == "choose_best":
        _choose_best(arguments)
        return
    what, wire, held = name.split("_")[:3]
    assert what == "reduce" and int(name.rsplit("_", 1)[1]) >= arguments.group.count
    _reduce(arguments, KINDS[wire], KINDS[held])


def _at(address: int, shape: Sequence[int], strides: Sequence[int], kind: torch.dtype) -> Tensor:
    size = 1 + sum((n - 1) * each for n, each in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (size * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind).as_strided(shape, strides)


def _exchanged(group: Any, own: Tensor) -> list[Tensor]:
    """What all ranks send, in their order; ``own`` goes to the others first."""
    for peer in range(group.count):
        if peer != group.rank:
            to = group.peers[peer] + group.rank * group.part_bytes
            _at(to, own.shape, own.stride(), own.dtype).copy_(own)
    found = []
    for rank in range(group.count):
        address = group.peers[group.rank] + rank * group.part_bytes
        part = own if rank == group.rank else _at(address, own.shape, own.stride(), own.dtype)
        assert not (part.view(torch.int32) == EMPTY - 2**32).any(), "waited for without end"
        found.append(part)
    return found


def _reduce(p: Any, wire: torch.dtype, held: torch.dtype) -> None:
    shape = (p.num_rows, p.width)
    own = _at(p.x, shape, (p.x_stride, 1), held).to(wire).contiguous()
    words = own.view(torch.int32)
    words[words == EMPTY - 2**32] = 0
    total = tree_sum([each.float() for each in _exchanged(p.group, own)])
    if p.residual:
        total = total + _at(p.residual, shape, (p.sum_stride, 1), torch.float32)
    if p.sum:
        _at(p.sum, shape, (p.sum_stride, 1), torch.float32).copy_(total)
    if p.out:
        if p.norm:
            norm = _at(p.norm, (p.width,), (1,), torch.float32)
            total = torch.nn.functional.rms_norm(total, (p.width,), norm, p.eps)
        kind = torch.bfloat16 if p.is_bf16 else torch.float32
        _at(p.out, shape, (p.out_stride, 1), kind).copy_(total)


def _choose_best(p: Any) -> None:
    keys = _at(p.keys, (p.num_rows, p.num_keys), (p.keys_stride, 1), torch.int64)
    own = keys.amax(1, keepdim=True) - p.first
    best = torch.stack(_exchanged(p.group, own)).amax(0)[:, 0]
    tokens, order = 0xFFFFFFFF - (best & 0xFFFFFFFF), best >> 32
    ends = _at(p.ends, (p.num_rows, p.num_ends), (p.ends_stride, 1), torch.int64)
    is_number = (order > -0x7F800001) & (order < 0x7F800000)
    why = torch.where(is_number, (ends == tokens[:, None]).any(1).long(), 2)
    _at(p.tokens, (p.num_rows,), (1,), torch.int64).copy_(tokens)
    _at(p.why, (p.num_rows,), (1,), torch.uint8).copy_(why)
    if p.positions:
        positions = _at(p.positions, (p.num_rows,), (1,), torch.int64)
        positions += positions >= 0
