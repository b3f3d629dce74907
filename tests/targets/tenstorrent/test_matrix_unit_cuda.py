"""The Triton kernel against golden values and the CPU's bits, on the GPU or in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.targets.tenstorrent.slow_matrix_unit import KINDS, golden_case, operand, slow_matmul
from tilewright.compiler.targets.tenstorrent.emulate import matrix_unit_cuda
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import MatmulSettings, matmul

GOLDEN = np.load(Path(__file__).with_name("golden_matmul.npz"))
NAMES = [name for name in GOLDEN.files if name not in ("act", "weight")]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernel runs; without a GPU it is asked to take the CPU's tensors."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    from tilewright.compiler.targets.tenstorrent.emulate import matrix_unit_cpu

    monkeypatch.setattr(matrix_unit_cpu, "accumulate", matrix_unit_cuda.accumulate)
    # The interpreter takes its time by the program, not by the element.
    monkeypatch.setattr(matrix_unit_cuda, "MOST_ROWS", 32)
    monkeypatch.setattr(matrix_unit_cuda, "COLUMNS", 64)
    return torch.device("cpu")


@pytest.mark.parametrize("name", NAMES[::12])
def test_golden_values(name: str, device: torch.device) -> None:
    act, weight, settings = golden_case(name, GOLDEN)
    differing = matmul(act.to(device), weight.to(device), settings).cpu().numpy() != GOLDEN[name]
    assert int(differing.sum()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_any_operands_as_in_the_slow_model(kind: str, device: torch.device) -> None:
    place = KINDS.index(kind)
    settings = MatmulSettings(1 + place % 4, fp32_dst=place % 2 == 1, l1_acc=True, k_block=32)
    settings = replace(settings, sign_error=place % 4 == 1)
    act, weight = operand(kind, (3, 75), 1), operand(kind, (75, 40), 2)
    got = matmul(act.to(device), weight.to(device), settings).cpu()
    want = slow_matmul(act, weight, settings)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_batches_transposed_and_reloaded(device: torch.device) -> None:
    settings = MatmulSettings(1, fp32_dst=False, l1_acc=False, k_block=32, out_format="bfp8")
    act, cache = operand("normal", (2, 1, 64), 3), operand("normal", (2, 33, 64), 4)
    got = matmul(act.to(device), cache.to(device).transpose(1, 2), settings).cpu()
    for batch in range(2):
        want = slow_matmul(act[batch], cache[batch].T, settings)
        assert torch.equal(got[batch].view(torch.int32), want.view(torch.int32))
