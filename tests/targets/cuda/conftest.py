"""Fixtures for CUDA kernels, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tilewright.compiler.formats.base import BlockEncoded
from tilewright.compiler.formats.block_float import BFP8
from tilewright.compiler.targets.cuda.kernels.attention.rope import rotate_and_store
from tilewright.compiler.targets.cuda.state.pages import PAGE, KVPages, allocate_pages
from tilewright.compiler.targets.cuda.steps import attention as steps_attention


@pytest.fixture(autouse=True)
def _real_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude padding rows from `rotate_and_store` in the interpreter, for speed.

    Its own tests include padding.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(steps_attention, "rotate_and_store", rotate_real_rows)


def rotate_real_rows(pages: KVPages, qkv: torch.Tensor, **given: Any) -> None:
    """Run `rotate_and_store` on each run of rows without padding."""
    by_row = {name: given.pop(name) for name in ("q_out", "k_out", "v_out", "positions", "slots")}
    for name in ("q_out", "k_out", "v_out"):
        if by_row[name] is not None:
            by_row[name].zero_()
    kinds = itertools.groupby(range(len(qkv)), key=(by_row["positions"] >= 0).tolist().__getitem__)
    for is_real, run in kinds:
        if is_real:
            rows = [*run]
            part = slice(rows[0], rows[-1] + 1)
            own = {name: each if each is None else each[part] for name, each in by_row.items()}
            rotate_and_store(pages, qkv[part], **own, **given)


@pytest.fixture
def device() -> torch.device:
    """The device for kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Paged:
    """Pages with some positions of some slots, and their float32 values [S, L, G, D]."""

    pages: KVPages
    tables: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def at(self, slot: int, position: int, of: int) -> torch.Tensor:
        """Return the fp32 key (``of`` = 0) or value (1) ``[G, D]`` at a position."""
        page, row = int(self.tables[slot, position // PAGE]), position % PAGE
        mantissas = self.pages.values[page, of, :, row].cpu()
        if self.pages.exponents is None:
            return mantissas.float()
        exponents = self.pages.exponents[page, of, :, row].cpu()
        return BFP8.dequantise(BlockEncoded(exponents=exponents, mantissas=mantissas, axis=-1))


@pytest.fixture
def paged(device: torch.device) -> Callable[..., Paged]:
    """Return a factory for shuffled pages with ``lengths[slot]`` random positions, and NaN
    elsewhere.
    """

    def make(kind: str, lengths: Sequence[int], *, num_pages: int, size: tuple[int, int]) -> Paged:
        num_slots = len(lengths)
        pages = allocate_pages(num_slots * num_pages + 1, *size, kind=kind, device=device)
        pages.values.fill_(127 if kind == "bfp8" else float("nan"))
        if pages.exponents is not None:
            pages.exponents.fill_(255)
        order = 1 + torch.randperm(num_slots * num_pages).view(num_slots, num_pages)
        held = torch.randn(2, num_slots, num_pages * PAGE, *size)
        if kind == "bfp8":
            encoded = BFP8.quantise(held)
            held = BFP8.dequantise(encoded)
        elif kind == "bf16":
            held = held.bfloat16().float()
        for slot, length in enumerate(lengths):
            for start in range(0, length, PAGE):
                page, stop = int(order[slot, start // PAGE]), min(start + PAGE, length)
                for of in (0, 1):
                    part = (of, slot, slice(start, stop))
                    rows = pages.values[page, of, :, : stop - start]
                    exact = encoded.mantissas if kind == "bfp8" else held
                    rows.copy_(exact[part].transpose(0, 1))
                    if pages.exponents is not None:
                        rows = pages.exponents[page, of, :, : stop - start]
                        rows.copy_(encoded.exponents[part].transpose(0, 1))
        return Paged(pages, order.to(torch.int32).to(device), held[0], held[1])

    return make
