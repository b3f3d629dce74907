"""fp32, bf16 and fp16: sizes, rounding, storage; and names without torch."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright.compiler.formats import FORMATS, FloatFormat


def test_sizes() -> None:
    assert [FORMATS[name].bits for name in ("fp32", "bf16", "fp16")] == [32, 16, 16]
    assert FORMATS["bf16"].nbytes((3, 5)) == 30


def test_bf16_rounds_to_nearest_even() -> None:
    step = 2.0**-7
    x = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -0.0, math.inf])
    values = FORMATS["bf16"].round_trip(x)
    assert values.tolist() == [1.0, 1 + 2 * step, 1 + step, 0.0, math.inf]
    assert math.copysign(1, values[3].item()) == -1
    assert FORMATS["bf16"].round_trip(torch.tensor([math.nan])).isnan().all()


def test_fp32_keeps_everything() -> None:
    x = torch.randn(7, 9)
    assert torch.equal(FORMATS["fp32"].round_trip(x), x)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_pack_and_unpack(name: str) -> None:
    x = torch.randn(3, 5)
    packed = FORMATS[name].pack(x.T)
    assert packed.dtype == torch.uint8
    assert packed.numel() == FORMATS[name].nbytes((5, 3))
    assert torch.equal(FORMATS[name].unpack(packed, (5, 3)), FORMATS[name].round_trip(x.T))


def test_unpack_from_an_odd_offset() -> None:
    packed = FORMATS["fp32"].pack(torch.tensor([1.5]))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), packed])[1:]
    assert FORMATS["fp32"].unpack(shifted, (1,)).item() == 1.5


def test_storage_dtype() -> None:
    bf16 = FORMATS["bf16"]
    assert isinstance(bf16, FloatFormat)
    assert bf16.quantise(torch.ones(2)).dtype == bf16.dtype == torch.bfloat16


def test_metadata_needs_no_torch() -> None:
    code = (
        "import sys, tilewright.compiler.precision, tilewright.compiler.devices;"
        "import tilewright.compiler.formats;"
        "assert tilewright.compiler.formats.FORMATS['bfp4'].nbytes((32, 32)) == 576;"
        "tilewright.compiler.precision.load_precision('performance').resolve(2).heading();"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_fp16_has_denormals_and_a_small_range() -> None:
    x = torch.tensor([65504.0, 65520.0, -1e9, 2.0**-24, 2.0**-26, 1 + 2.0**-11, math.nan])
    values = FORMATS["fp16"].round_trip(x)
    expected = [65504.0, math.inf, -math.inf, 2.0**-24, 0.0, 1.0]
    assert values[:-1].tolist() == expected
    assert math.isnan(values[-1])


def test_bf16_keeps_denormals_and_the_range_of_fp32() -> None:
    x = torch.tensor([2.0**-133, -(2.0**-126), 3.3e38, 3.4028e38])
    values = FORMATS["bf16"].round_trip(x)
    assert values[:2].tolist() == [2.0**-133, -(2.0**-126)]
    assert math.isfinite(values[2])
    assert math.isinf(values[3])


def test_bytes_are_little_endian() -> None:
    x = torch.tensor([1.0, -2.0])
    assert FORMATS["fp32"].pack(x).tolist() == [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0]
    assert FORMATS["bf16"].pack(x).tolist() == [0x80, 0x3F, 0, 0xC0]
    assert FORMATS["fp16"].pack(x).tolist() == [0, 0x3C, 0, 0xC0]


def test_formats_do_not_change() -> None:
    for data_format in FORMATS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            data_format.name = "other"  # type: ignore[misc]
