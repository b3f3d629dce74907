"""fp32, bf16 and fp16: sizes, rounding, storage; and names without torch."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiler.formats import FORMATS, FloatFormat


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


@pytest.mark.parametrize("name", ("fp32", "bf16", "fp16"))
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
        "import sys, compiler.precision, compiler.devices, compiler.formats;"
        "assert compiler.formats.FORMATS['bfp4'].nbytes((32, 32)) == 576;"
        "compiler.precision.load_precision('performance').resolve(2).heading();"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
