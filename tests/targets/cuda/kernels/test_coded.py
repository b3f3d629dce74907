"""Matmul with weights in tiles of codes: exact values, odd sizes, fused operations, equal bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.targets.cuda.kernels.test_gemv_triton import assert_near, poisoned, tokens
from tilewright.compiler.formats import GgmlFileFormat, ScaledCodes, ScaledEncoded, get_format
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.kernels.matmul.coded_rows import decode_rows
from tilewright.compiler.targets.cuda.kernels.matmul.coded_triton import linear
from tilewright.compiler.targets.cuda.weights.coded import pack_coded, unpack_coded
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

KINDS = list(CODED_TILES)


class File:
    """Rows of random blocks, as a file has them."""

    def __init__(self, kind: str, num_rows: int, num_columns: int) -> None:
        rng = np.random.default_rng(num_rows + num_columns)
        self.format, self.shape = get_format(kind), (num_rows, num_columns)
        row_bytes = self.format.nbytes((1, num_columns))
        if isinstance(self.format, GgmlFileFormat):
            self.data = torch.from_numpy(rng.integers(0, 256, (num_rows, row_bytes), np.uint8))
            block_bytes = self.format.nbytes((1, self.format.block))
            blocks = self.data.view(-1, block_bytes)
            halves = torch.from_numpy(rng.uniform(1e-3, 2e-3, (len(blocks), 2))).half()
            places = {"q6_k": [(208, 1)], "iq4_xs": [(0, 1)]}.get(kind, [(0, 2)])
            for first, count in places:
                part = halves[:, :count].contiguous().view(torch.uint8)
                blocks[:, first : first + 2 * count] = part
        elif isinstance(self.format, ScaledCodes) and self.format.codebook:
            codes = torch.from_numpy(rng.integers(0, 16, self.shape, np.uint8))
            blocks = num_rows, -(-num_columns // self.format.block)
            scales = torch.from_numpy(rng.uniform(0.01, 0.02, blocks).astype(np.float32))
            if kind == "nvfp4":
                scales = nvfp4_scales(rng, blocks)
            self.data = self.format.pack_encoded(ScaledEncoded(codes, scales, -1))
            self.data = self.data.view(num_rows, -1)
        else:
            dense = torch.from_numpy(rng.standard_normal(self.shape)).float()
            self.data = self.format.pack(dense / num_columns**0.5).view(num_rows, -1)
        self.values = self.format.unpack(self.data.flatten(), self.shape)
        self.factors = self.values  # in matmuls, where codes have bfloat16 values
        if isinstance(self.format, ScaledCodes) and self.format.codebook:
            book = torch.tensor(self.format.codebook).bfloat16().tolist()
            rounded = replace(self.format, codebook=tuple(book))
            self.factors = rounded.unpack(self.data.flatten(), self.shape)

    def __call__(self, name: str) -> torch.Tensor:
        return self.values

    def stored(self, name: str, first: int, last: int) -> torch.Tensor:
        return self.data[first:last]

    def place(self, device: torch.device, *, paired: bool = False) -> PackedWeight:
        recipe = WeightRecipe((Segment("w", self.shape[0]),), self.shape)
        return pack_coded(recipe.as_stored(self.format.name), self, device, paired=paired)


def nvfp4_scales(rng: np.random.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """Return e4m3 scales times or divided by a second scale, for two tensors."""
    bytes_ = torch.from_numpy(rng.integers(0, 127, shape, np.uint8))
    stored = bytes_.view(torch.float8_e4m3fn).float() * torch.tensor((1, -1))[bytes_[:1].long() & 1]
    half = shape[0] // 2
    return torch.cat((stored[:half] * 3.1e-5, stored[half:] / 18561.7))


def size_of(kind: str, columns: int) -> int:
    """Return a number of columns that the format has."""
    block = get_format(kind).block
    return -(-columns // block) * block if block > 32 else columns


@pytest.mark.parametrize("kind", KINDS)
def test_held_weight_has_the_values_of_the_file(kind: str, device: torch.device) -> None:
    file = File(kind, 48, size_of(kind, 200))
    held = file.place(device)
    assert torch.equal(unpack_coded(held).cpu(), file.values)
    out, around = poisoned(file.shape, device)
    decode_rows(out, held)
    assert torch.equal(out.cpu(), file.values) and bool(around[:, file.shape[1] :].isnan().all())
    picked = torch.tensor([5, 47, 5, 0], device=device)
    some, _ = poisoned((4, file.shape[1]), device)
    decode_rows(some, held, picked)
    assert torch.equal(some.cpu(), file.values[picked.cpu()])


def test_a_second_launch_copies_nothing_from_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph captures it."""
    file = File("nvfp4", 48, 64)
    held, x = file.place(device), tokens((1, 64), device)
    (rows, _), (out, _) = poisoned(file.shape, device), poisoned((1, 48), device)
    for _ in range(2):
        decode_rows(rows, held)
        linear(out, x, held)
        monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(rows.cpu(), file.values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 40), (20, 70)])
def test_matmul_is_near_the_exact_product(
    kind: str, num_tokens: int, rows: int, device: torch.device
) -> None:
    file = File(kind, rows, size_of(kind, 330))
    held, x = file.place(device), tokens((num_tokens, file.shape[1]), device)
    out, around = poisoned((num_tokens, rows), device)
    linear(out, x, held)
    exact = x[:, : file.shape[1]].double().cpu() @ file.factors.double().T
    torch.testing.assert_close(out.double().cpu(), exact, rtol=2e-5, atol=2e-5)
    assert bool(around[:, rows:].isnan().all())


@pytest.mark.parametrize("kind", ["q40", "q6_k"])
def test_pairs_bias_and_residual(kind: str, device: torch.device) -> None:
    file = File(kind, 32, size_of(kind, 256))
    x = tokens((3, file.shape[1]), device)
    exact = x[:, : file.shape[1]].double().cpu() @ file.values.double().T
    held = file.place(device, paired=True)
    gated, _ = poisoned((3, 16), device, torch.bfloat16)
    linear(gated, x, held, swiglu=True)
    gate, up = exact.chunk(2, dim=1)
    assert_near(gated.cpu(), gate * gate.sigmoid() * up)
    bias = torch.randn(32, device=device)
    out = torch.ones(3, 32, device=device)
    linear(out, x, file.place(device), bias=bias, residual=True)
    wanted = exact + 1 + bias.double().cpu()
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_small_m", [True, False])
def test_bits_of_a_row_do_not_depend_on_other_rows(is_small_m: bool, device: torch.device) -> None:
    file = File("q40", 32, 256)
    held, x = file.place(device), tokens((20, 256), device)
    whole, _ = poisoned((20, 32), device)
    linear(whole, x, held, is_small_m=is_small_m)
    for part in (slice(0, 1), slice(3, 12)):
        some, _ = poisoned((part.stop - part.start, 32), device)
        linear(some, x[part], held, is_small_m=is_small_m)
        assert torch.equal(some, whole[part])
