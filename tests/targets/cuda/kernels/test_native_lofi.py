"""lofi.cu: its tiles by hand, its kernels as they are launched, and on a GPU what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.targets.cuda.kernels.test_native import (
    NAN,
    check_headers,
    gpu_of,
    shaped,
    tokens,
    weight,
)
from tests.targets.cuda.lofi_bounds import check_sums
from tilewright.compiler.targets.cuda.e4m3 import CODES, round_rows, values
from tilewright.compiler.targets.cuda.held import HeldWeight
from tilewright.compiler.targets.cuda.kernels import native, native_lofi
from tilewright.compiler.targets.cuda.lofi_tiles import LofiWeight, lofi_tiles
from tilewright.compiler.targets.cuda.packing import hold, unpack

SIZE = (40, 200)


def held_over(octaves: int) -> HeldWeight:
    """Blocks of every exponent within so many octaves of their row's largest, and of zeros."""
    dense = torch.randn(*SIZE) * torch.exp2(torch.arange(SIZE[0]) - 20.0)[:, None]
    powers = torch.randint(-octaves, 1, (SIZE[0], -(-SIZE[1] // 16)))
    powers[:, 0] = 0
    dense *= torch.exp2(powers.float()).repeat_interleave(16, 1)[:, : SIZE[1]]
    dense[:, ::16] = dense[:, ::16].sign() * torch.exp2(dense[:, ::16].abs().log2().ceil())
    dense[3, 32:48] = 0.0
    dense[5] = 0.0
    return hold(dense, "bfp4", paired=False)


def table(index: Tensor, magnitude: Tensor) -> Tensor:
    """What `codes_of` of lofi.cu puts in its table: the integer it rounds no bit of, as a code."""
    number = magnitude.int() << index.int()
    power = number.clamp(min=1).float().log2().floor().int()
    code = torch.where(power < 3, number, (power - 2) << 3 | (number >> (power - 3).clamp(0)) & 7)
    return code.to(torch.uint8).view(CODES).float() * (magnitude > 0)


def fragments(found: LofiWeight) -> Tensor:
    """float32 ``[row tiles, column tiles, 16 rows, 128 places]``: a lane's registers of the four
    products of a step, after `decode_lofi`, where the matrix unit takes them to be.
    """
    data = found.data.cpu()
    words = data[..., :1024].contiguous().view(torch.int32).view(*data.shape[:2], 2, 32, 4).long()
    words &= 0xFFFFFFFF
    indices = data[..., 1024:].view(*data.shape[:2], 32, 4)
    out = torch.full((*data.shape[:2], 16, 128), NAN)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for side in (0, 1):
            for i in range(4):  # a word, and a product of 32 places
                word, index = words[:, :, side, lane, i], indices[:, :, lane, 2 * (i // 2) + side]
                for register in (0, 1):
                    signs = word << (4 * register)
                    for byte in range(4):
                        magnitude = word >> (16 * register + 4 * byte) & 7
                        sign = 1.0 - 2.0 * (signs >> (8 * byte + 7) & 1)
                        place = 32 * i + 16 * register + 4 * t + byte
                        out[:, :, g + 8 * side, place] = table(index, magnitude) * sign
    return out


def arranged(x: Tensor) -> Tensor:
    """``[M, steps, 128]``: columns where `arrange_lofi` puts them, pieces not yet exchanged."""
    column = torch.arange(128)
    half, t, q, b, e = (
        column // size % count for size, count in ((64, 2), (16, 4), (8, 2), (4, 2), (1, 4))
    )
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).view(len(x), -1, 128)
    out = torch.full_like(padded, NAN)
    out[:, :, 64 * half + 32 * q + 16 * b + 4 * t + e] = padded
    # As the kernel has it: the piece of 16 bytes and the word in it of every fourth column.
    at = column[::4]
    piece, word = (at >> 4 & 4) | (at >> 2 & 3), at >> 4 & 3
    assert torch.equal(out[:, :, 16 * piece + 4 * word], padded[:, :, ::4])
    return out


@pytest.mark.parametrize("octaves", [0, 6, 12])
def test_fragments_times_arranged_x_is_the_product(octaves: int) -> None:
    """The layouts of both operands together, with the values to the bit."""
    held = held_over(octaves)
    found = lofi_tiles(held)
    assert found is not None and found.data.shape == held.data.shape
    decoded = fragments(found)
    rows = decoded.permute(0, 2, 1, 3).reshape(-1, decoded.shape[1], 128)
    x = torch.eye(SIZE[1])
    product = torch.einsum("msk,nsk->mn", arranged(x).double(), rows.double())
    product = product[:, : SIZE[0]] * found.scales[: SIZE[0]]
    assert torch.equal(product.T.float(), unpack(held))


def test_what_is_not_exact_is_refused() -> None:
    held = held_over(0)
    assert lofi_tiles(held) is not None
    dense = unpack(held)
    dense[0, 16:32] *= 2.0**-30
    assert lofi_tiles(hold(dense, "bfp4", paired=False)) is None
    dense[0, 16:32] = 0.0
    dense[0, 16] = dense[0].abs().max().log2().floor().exp2() * 2.0**-17  # 4 of its block
    assert lofi_tiles(hold(dense, "bfp4", paired=False)) is not None


def test_a_scale_of_the_whole_is_kept() -> None:
    held = hold(unpack(held_over(3)) * 2.0**8, "bfp4", paired=False)
    found = lofi_tiles(held)
    assert held.scale > 1 and found is not None
    rows = fragments(found).permute(0, 2, 1, 3).reshape(-1, 256)
    largest = rows.abs().amax(1)[: SIZE[0]] * found.scales[: SIZE[0]]
    assert torch.equal(largest, unpack(held).abs().amax(1))


def test_what_is_chosen_is_there_and_fits() -> None:
    for count in range(1, 513):
        way = native_lofi.choose_way(count)
        assert way.kernel in native_lofi.SOURCE.names
        assert way.resident * (way.shared_bytes + 2048) <= native.MOST_SHARED + 3072
        assert way.depth >= 2
    assert native_lofi.takes(shaped("bfp4", 28672, 4096))
    assert not native_lofi.takes(shaped("bfp4", 4096, 4096))
    assert not native_lofi.takes(shaped("bfp8", 28672, 4096))


def test_every_header_is_named_once() -> None:
    check_headers(native_lofi.SOURCE)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU on which lofi.cu runs."""
    return gpu_of(device, native_lofi.why_not)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(16400, 640), (28672, 4096), (16384, 200)])
def test_products(size: tuple[int, int], gpu: torch.device) -> None:
    """Against float64 of the rounded x, at the first rows and the last, and columns by chance; no
    row's bits depend on others; nothing else is written.
    """
    held = weight("bfp4", size, gpu, paired=False)
    found = lofi_tiles(held)
    assert found is not None
    x = torch.cat([tokens(held, gpu) for _ in range(8)])
    x[3] *= 1000
    x[4] = 0
    bias = torch.randn(size[0], device=gpu)
    read, dense = values(*round_rows(x[:, : size[1]])), unpack(held)
    some = torch.randint(size[0], (60,), device=gpu)
    first = None
    for way in native_lofi.WAYS:
        for count in (1, 17, 64, 65, 200, 512):
            around = torch.full((514, size[0] + 8), NAN, device=gpu)
            out = around[:count, : size[0]]
            how = {"bias": bias, "way": way}
            native_lofi.linear(out, x[:count], found, epilogue=native.STORE, **how)
            for rows in (slice(0, 6), slice(max(0, count - 6), count)):
                wanted = read[:count][rows], dense[some]
                check_sums(out[rows][:, some], *wanted, bias=bias[some])
            assert bool(around[count:].isnan().all()) and bool(around[:, size[0] :].isnan().all())
            first = out.clone() if first is None else first
            assert torch.equal(out[:1], first[:1])
    total = torch.ones(200, size[0], device=gpu)
    native_lofi.linear(total, x[:200], found, epilogue=native.ADD)
    check_sums(total[:9, some], read[:9], dense[some], bias=torch.ones_like(bias[some]))


@pytest.mark.gpu
def test_swiglu(gpu: torch.device) -> None:
    held = weight("bfp4", (16384, 2048), gpu, paired=True)
    found = lofi_tiles(held)
    assert found is not None
    x = torch.cat([tokens(held, gpu), tokens(held, gpu)])[:100]
    y = values(*round_rows(x)).double() @ unpack(held).double().T
    gate, up = y.view(100, -1, 2, 8).unbind(2)
    want = (gate * gate.sigmoid() * up).flatten(1)
    out = torch.full((100, 8192), NAN, dtype=torch.bfloat16, device=gpu)
    native_lofi.linear(out, x, found, epilogue=native.SWIGLU)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)
