"""Packed weight bytes: the documented layout by hand, and exact values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.formats import get_format
from tilewright.compiler.formats.scaled_codes import E2M1
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.weights import experts
from tilewright.compiler.targets.cuda.weights.packed_weight import BIAS, EXPONENTS, TILE_BYTES
from tilewright.compiler.targets.cuda.weights.packing import fits, hold, unpack
from tilewright.errors import CompileError


def random_mxfp4(
    shape: tuple[int, ...], device: torch.device | None = None, low: int = -9, high: int = -3
) -> torch.Tensor:
    """Values of random codes and exponents."""
    blocks = (*shape[:-1], -(-shape[-1] // 32))
    exponents = torch.randint(low, high + 1, blocks, device=device).float()
    codes = torch.randint(0, 16, shape, device=device)
    scales = torch.exp2(exponents).repeat_interleave(32, -1)[..., : shape[-1]]
    return torch.tensor(E2M1, device=device)[codes] * scales


def whole_range_mxfp4(
    shape: tuple[int, ...], device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values with all exponents of a packed tile, and powers of two by column for products near 1.

    Rows differ by up to four octaves.
    """
    low, high = EXPONENTS["mxfp4"]
    first, last = low - 127 + 1, high - 127 - 2  # of the smallest and the largest code
    octaves = torch.linspace(first, last, shape[-1] // 32, device=device).round()
    exponents = octaves + torch.randint(-2, 3, (*shape[:-1], len(octaves)), device=device)
    exponents[..., 0], exponents[..., -1] = first, last
    scales = torch.exp2(exponents.clamp(first, last)).repeat_interleave(32, -1)
    codes = torch.randint(0, 16, shape, device=device)
    has_halves = (torch.rand(exponents.shape, device=device) < 0.3).repeat_interleave(32, -1)
    codes = torch.where(has_halves, codes & 9, codes)  # at most 0.5
    dense = torch.tensor(E2M1, device=device)[codes] * scales
    dense[..., 0], dense[..., -1] = 0.5 * 2.0**first, 6 * 2.0**last
    dense[..., 1:32] = 0
    return dense, torch.exp2(-octaves).repeat_interleave(32)


def test_the_whole_range_has_all_exponents() -> None:
    dense, scales = whole_range_mxfp4((48, 124 * 32))
    largest = dense.view(48, 124, 32).abs().amax(-1)
    low, high = EXPONENTS["mxfp4"]
    assert {*(largest.view(torch.int32) >> 23).flatten().tolist()} >= {*range(low, high + 1)}
    held = hold(dense, "mxfp4", paired=False)
    assert torch.equal(unpack(held), dense) and fits(dense, "mxfp4") and held.scale == 1
    assert (dense * scales).abs().max() <= 24


SIZES = [(16, 128), (32, 256), (1, 1), (5, 17), (17, 129), (48, 576), (33, 200), (100, 72)]


@pytest.mark.parametrize("kind", ["bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize("size", SIZES)
def test_values_are_the_formats(kind: str, size: tuple[int, int]) -> None:
    dense = torch.randn(size) * 0.1
    held = hold(dense, kind, paired=False)
    assert torch.equal(unpack(held), get_format(kind).round_trip(dense))
    assert (held.num_rows, held.num_columns) == size
    if kind == "bf16":
        assert held.data.shape == (held.num_row_tiles * 16, held.num_column_tiles * 128)
        assert float(held.data.float().abs().sum()) == float(unpack(held).abs().sum())
    else:
        tiles = (held.num_row_tiles, held.num_column_tiles, TILE_BYTES[kind])
        assert held.data.shape == tiles


@pytest.mark.parametrize(("low", "high"), [(-9, -3), (-122, -110), (3, 12)])
@pytest.mark.parametrize("size", SIZES)
def test_values_of_mxfp4_are_kept(size: tuple[int, int], low: int, high: int) -> None:
    """Large exponents have a scale, and tiles have 4.25 bits a weight."""
    dense = random_mxfp4(size, low=low, high=high)
    held = hold(dense, "mxfp4", paired=False)
    assert torch.equal(unpack(held), dense) and fits(dense, "mxfp4")
    assert (held.scale > 1) == (high > 0 and bool(dense.abs().max() >= 16))
    assert held.data.shape == (held.num_row_tiles, held.num_column_tiles, 16 * 128 * 17 // 32)


@pytest.mark.parametrize("value", [5.0, 0.24, 2.0**-126, float("inf"), float("nan")])
def test_mxfp4_refuses_other_values(value: float) -> None:
    dense = torch.full((16, 128), 1.0 if value != 2.0**-126 else 0.0)
    dense[3, 7] = value
    with pytest.raises(CompileError, match=r"^row 3: a (value|block) .*; allowed: ") as caught:
        hold(dense, "mxfp4", paired=False, name_of=lambda index: f"row {index}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [5.0, 2.0**-126])
@pytest.mark.parametrize("paired", [False, True])
def test_mxfp4_refuses_an_expert_by_its_tensors(
    paired: bool, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an expert in a later batch, with padding between experts."""
    parts = ("gate", "up") if paired else ("down",)
    names = [f"{expert}.{part}" for expert in range(5) for part in parts]
    tensors = {name: random_mxfp4((20, 96)) for name in names}
    tensors[names[-1]][17, 40:64] = value
    tensors[names[-1]][17, 32:40] = 1.0 if value == 5.0 else 0.0
    shape = 5, 20 * len(parts), 96
    recipe = WeightRecipe(tuple(Segment(name, 20) for name in names), shape, "mxfp4")
    for together in (1 << 24, 2 * 48 * 96):
        monkeypatch.setattr(experts, "_TOGETHER", together)
        with pytest.raises(CompileError) as caught:
            experts.place_experts(
                recipe,
                "mxfp4",
                tensors.__getitem__,
                torch.device("cpu"),
                paired=paired,
                check=lambda *_: None,
            )
        message = str(caught.value)
        assert message.startswith(f"{', '.join(names[-len(parts) :])}: a ")
        assert "; allowed: " in message and "\n" not in message


def test_rows_that_cannot_be_paired_are_refused_by_name() -> None:
    with pytest.raises(CompileError, match=r"^w: 24 rows .* cannot be paired; allowed: multiples"):
        hold(torch.ones(24, 128), "mxfp4", paired=True, name_of=lambda _: "w")


@pytest.mark.parametrize("row", [0, 3, 8, 15])
@pytest.mark.parametrize("column", [0, 1, 2, 5, 7, 15, 16, 40, 63, 64, 77, 127])
def test_a_code_of_an_mxfp4_tile(row: int, column: int) -> None:
    """A value has its code's sign, exponent and fraction bits in the documented word."""
    tile = hold(one_hot_tile(row, column), "mxfp4", paired=False).data[0, 0]
    half, lane = column // 64, 4 * (row % 8) + column % 64 // 16
    word = row // 8 * 128 + lane * 4 + half * 2 + column % 16 // 8
    pair, upper = column % 8 // 2, column % 2 * 16
    # -1.5 is the code 15 (-6) at the exponent -2. A sign is in the other half word.
    bits = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 13, 14))[pair]
    wanted = sum(1 << (bit + upper) % 32 for bit in bits)
    words = tile[:1024].view(torch.int32).tolist()
    assert [at for at, value in enumerate(words) if value] == [word]
    assert words[word] & 0xFFFFFFFF == wanted
    exponents = tile[1024:].tolist()
    changed = [at for at, value in enumerate(exponents) if value != 64]
    assert changed == [lane // 2 * 4 + half * 2 + row // 8] and exponents[changed[0]] == 124


@given(
    kind=st.sampled_from(["bfp8", "bfp4"]),
    low=st.integers(-126, -1),
    span=st.integers(0, 140),
    seed=st.integers(0, 2**20),
)
def test_values_over_wide_ranges(kind: str, low: int, span: int, seed: int) -> None:
    """A block has powers of two in all sizes, zeros and denormals."""
    generator = torch.Generator().manual_seed(seed)
    low = max(low, -123) if kind == "bfp4" else low
    high = min(low + span, -1)
    powers = torch.randint(low, high + 1, (20, 150), generator=generator)
    dense = (torch.randn(20, 150, generator=generator).clamp(-1.9, 1.9)) * torch.exp2(powers)
    dense[torch.rand(20, 150, generator=generator) < 0.2] = 0.0
    if kind == "bfp4":  # blocks below the range are refused, in another test
        dense[:, ::16] = 2.0**low
    assert torch.equal(unpack(hold(dense, kind, paired=False)), get_format(kind).round_trip(dense))


@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
def test_zeros_and_denormals(kind: str) -> None:
    dense = torch.zeros(20, 140)
    dense[3] = 1e-42
    dense[4, 20] = -0.0
    held = hold(dense, kind, paired=False)
    assert torch.equal(unpack(held), torch.zeros(20, 140))
    assert bool((held.data[..., -128:] == 64).all())


@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
def test_the_smallest_normals_are_kept(kind: str) -> None:
    """Blocks with the smallest exponents, where float arithmetic could underflow."""
    dense = torch.full((16, 128), 2.0**-124)
    dense[:, 1::2] = 2.0**-126 * 1.5
    expected = get_format(kind).round_trip(dense)
    assert torch.equal(unpack(hold(dense, kind, paired=False)), expected)


def one_hot_tile(row: int, column: int) -> torch.Tensor:
    """Return a tile with a value in a single place. All blocks elsewhere are zero."""
    dense = torch.zeros(16, 128)
    dense[row, column] = -1.5
    return dense


@pytest.mark.parametrize("row", [0, 3, 8, 15])
@pytest.mark.parametrize("column", [0, 1, 2, 3, 6, 15, 16, 63, 64, 77, 127])
def test_a_byte_of_a_bfp8_tile(row: int, column: int) -> None:
    data = hold(one_hot_tile(row, column), "bfp8", paired=False).data.flatten()
    lane = 4 * (row % 8) + column % 64 // 16
    piece = 2 * (column // 64) + row // 8
    expected = torch.zeros(2176, dtype=torch.uint8)
    expected[2048:] = 64
    byte = (0, 2, 1, 3)[column % 4]
    word = 512 * piece + 16 * lane + column % 16 // 4 * 4
    expected[word + byte] = 96
    expected[word + (byte ^ 1)] |= 0x80
    expected[2048 + 4 * lane + piece] = 127
    assert torch.equal(data, expected)
    assert -96 * 2.0 ** (127 - BIAS["bfp8"]) == -1.5


@pytest.mark.parametrize("row", [0, 3, 8, 15])
@pytest.mark.parametrize("column", [0, 1, 2, 3, 4, 5, 6, 7, 15, 16, 63, 64, 77, 127])
def test_a_nibble_of_a_bfp4_tile(row: int, column: int) -> None:
    data = hold(one_hot_tile(row, column), "bfp4", paired=False).data.flatten()
    lane, half = 4 * (row % 8) + column % 64 // 16, column // 64
    word = 128 * (row // 8) + 4 * lane + 2 * half + column % 16 // 8
    part, half_word = column % 8 // 2, 16 * (column % 2)
    words = [0x08080808] * 256
    if part % 2:
        words[word] |= (6 << 4 * part | (1 << 15 if part == 1 else 1 << 7)) << half_word
    else:
        words[word] += (-6 + 8 - 8) << (4 * part + half_word)
    expected = torch.full((1152,), 64, dtype=torch.uint8)
    raw = b"".join(value.to_bytes(4, "little") for value in words)
    expected[:1024] = torch.tensor(list(raw), dtype=torch.uint8)
    expected[1024 + 4 * lane + 2 * half + row // 8] = 127
    assert torch.equal(data, expected)
    assert -6 * 2.0 ** (127 - BIAS["bfp4"]) == -1.5


@pytest.mark.parametrize("kind", ["bf16", "bfp8", "bfp4"])
def test_pairs_stand_in_turns_of_eight(kind: str) -> None:
    dense = torch.randn(48, 40) * 0.1
    gate, up = get_format(kind).round_trip(dense).chunk(2)
    held = hold(dense, kind, paired=True)
    values = unpack(held)
    assert held.is_paired
    for group in range(3):
        assert torch.equal(values[16 * group : 16 * group + 8], gate[8 * group : 8 * group + 8])
        assert torch.equal(values[16 * group + 8 : 16 * group + 16], up[8 * group : 8 * group + 8])


@pytest.mark.parametrize("kind", ["bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize("paired", [False, True])
def test_packing_in_pieces_changes_nothing(
    kind: str, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = torch.randn(80, 200) * 0.1
    whole = hold(dense, kind, paired=paired)
    monkeypatch.setattr(
        "tilewright.compiler.targets.cuda.weights.packing._CHUNK_ELEMENTS", 2 * 16 * 256
    )
    assert torch.equal(hold(dense, kind, paired=paired).data, whole.data)


@pytest.mark.parametrize(
    ("kind", "value", "is_held"),
    [
        ("bfp8", 1.99, True),
        ("bfp8", 2.0, True),
        ("bfp8", 3e38, True),
        ("bfp8", 2.0**-126, True),
        ("bfp8", 1e-40, True),
        ("bfp4", 1.75, True),
        ("bfp4", 2.0, True),
        ("bfp4", 2.0**-124, True),
        ("bfp4", 2.0**-125, False),
        ("bfp4", float("inf"), False),
        ("bfp8", float("nan"), False),
        ("bf16", 1e30, True),
    ],
)
def test_what_fits(kind: str, value: float, is_held: bool) -> None:
    dense = torch.zeros(3, 20)
    dense[1, 17] = value
    assert fits(dense, kind) is is_held
    if is_held:
        hold(dense, kind, paired=False)
        return
    with pytest.raises(CompileError, match=rf"a weight: a block of {kind} has exponent \d+; allow"):
        hold(dense, kind, paired=False)


@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
@pytest.mark.parametrize("largest", [2.0, 57.3, 6e4])
def test_values_of_two_and_more_are_held_with_a_scale(kind: str, largest: float) -> None:
    dense = torch.randn(35, 130) * 0.02
    dense[7, 19] = largest
    held = hold(dense, kind, paired=False)
    assert held.scale > 1 and torch.tensor(held.scale).log2() % 1 == 0
    assert torch.equal(unpack(held), get_format(kind).round_trip(dense))


@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
def test_blocks_too_far_apart_do_not_fit(kind: str) -> None:
    dense = torch.full((1, 32), 1e-30)
    dense[0, 16:] = 1e30
    assert not fits(dense, kind)


def test_what_cannot_be_held() -> None:
    with pytest.raises(CompileError, match="no weights in q40; allowed: bf16, bfp8, bfp4"):
        hold(torch.zeros(16, 16), "q40", paired=False)
    with pytest.raises(CompileError, match="no weights in q40"):
        fits(torch.zeros(16, 16), "q40")
    with pytest.raises(CompileError, match="24 rows of gate and up"):
        hold(torch.zeros(24, 16), "bf16", paired=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize("size", [(28672, 4096), (112, 14336), (80, 300)])
def test_a_device_packs_the_same_bytes(
    kind: str, size: tuple[int, int], device: torch.device
) -> None:
    dense = torch.randn(size) * 0.02
    here, there = hold(dense, kind, paired=True), hold(dense.to(device), kind, paired=True)
    assert torch.equal(there.data.cpu(), here.data)
    assert torch.equal(unpack(there).cpu(), unpack(here))


def bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 for all 16-bit patterns, as float32."""
    return (bits.to(torch.int32) << 16).view(torch.float32)


def halves(words: torch.Tensor) -> torch.Tensor:
    """Return the halves of each 32-bit word, low half first."""
    return torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1)


def exchanged(words: torch.Tensor) -> torch.Tensor:
    """Return words with swapped bytes in both halves."""
    return (words & 0x00FF00FF) << 8 | words >> 8 & 0x00FF00FF


@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
def test_a_mask_and_one_scale_decode(kind: str) -> None:
    """The device arithmetic is exact for all codes and exponents."""
    least, most = EXPONENTS[kind]
    codes = torch.arange(-127, 128) if kind == "bfp8" else torch.arange(-7, 8)
    largest = int(codes.max())
    # A row per exponent with all codes in all places. The largest code sets the exponent.
    places = 4 if kind == "bfp8" else 8
    columns = 16 * places * len(codes)
    mantissas = torch.full((1, columns), largest)
    for index, code in enumerate(codes.tolist()):
        for place in range(places):
            mantissas[0, 16 * (index * places + place) + place] = code
    exponents = torch.arange(max(least, 1), most + 1)  # 0 is the exponent for zeros
    dense = mantissas.double() * torch.exp2(exponents.double() - BIAS[kind])[:, None]
    exact = get_format(kind).round_trip(dense.float()).double()
    assert torch.equal(exact[6:], dense[6:])  # below, the format reads subnormal float32 as 0
    held = hold(exact.float(), kind, paired=False)
    words = held.data.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    pieces = words[..., :-32].unflatten(-1, (-1, 32, 4))
    assert pieces.shape[2] == (4 if kind == "bfp8" else 2)
    lane_exponents = held.data[..., -128:].long().view(*words.shape[:2], 32, 2, 2)
    scale = torch.exp2(lane_exponents.double())  # lane, half, row
    decoded = torch.zeros(held.data.shape[0], held.data.shape[1], 2, 32, 2, 16).double()
    for half in range(2):
        for row in range(2):
            factor = scale[..., half, row][..., None, None]
            if kind == "bfp8":
                piece = pieces[:, :, 2 * half + row]
                parts = [piece & 0x807F807F, exchanged(piece) & 0x807F807F]
                values = [bfloat16(halves(part)).double() * factor for part in parts]
            else:
                piece = pieces[:, :, row, :, 2 * half : 2 * half + 2]
                values = []
                for word in (piece, exchanged(piece)):
                    raised = bfloat16(halves(word & 0x000F000F | 0x02800280)).double()
                    offset = bfloat16(torch.tensor(0x8288)).double() * factor
                    assert torch.equal(offset.bfloat16().double(), offset)
                    values.append(raised * factor + offset)
                    values.append(bfloat16(halves(word & 0x80708070)).double() * factor)
            block = torch.stack(values, dim=-2).flatten(-3)
            assert torch.equal(block.bfloat16().double(), block)
            decoded[:, :, row, :, half] = block
    # Row tile, column tile, row + 8, g, t, half, 16 columns.
    order = decoded.unflatten(3, (8, 4)).permute(0, 2, 3, 1, 5, 4, 6)
    order = order.reshape(held.data_shape[0] * 16, -1)
    assert torch.equal(order[: len(exponents), :columns], exact)
