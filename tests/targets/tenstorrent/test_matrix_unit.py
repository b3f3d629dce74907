"""Products on the CPU: golden values, the slow model on every kind of operand, shapes, errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.targets.tenstorrent.slow_matrix_unit import KINDS, golden_case, operand, slow_matmul
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import (
    MatmulSettings,
    matmul,
)
from tilewright.errors import CompileError

GOLDEN = np.load(Path(__file__).with_name("golden_matmul.npz"))
BLACKHOLE = np.load(Path(__file__).with_name("golden_matmul_blackhole.npz"))
NAMES = [name for name in GOLDEN.files if name not in ("act", "weight")]
LOFI = MatmulSettings(1, fp32_dst=False, l1_acc=True, k_block=64)
HIFI2 = MatmulSettings(2, fp32_dst=True, l1_acc=True, k_block=32)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32))


def all_settings() -> st.SearchStrategy[MatmulSettings]:
    return st.builds(
        MatmulSettings,
        num_phases=st.integers(1, 4),
        fp32_dst=st.booleans(),
        l1_acc=st.booleans(),
        k_block=st.sampled_from([32, 64, 128]),
        out_format=st.sampled_from(["fp32", "bf16", "bfp8", "bfp4"]),
        sign_error=st.booleans(),
    )


def test_the_golden_file_has_its_48_settings() -> None:
    assert len(NAMES) == 48


@pytest.mark.parametrize("name", NAMES)
def test_golden_values(name: str) -> None:
    """Bit for bit, with the signs of zeros."""
    assert same_bits(matmul(*golden_case(name, GOLDEN)), torch.from_numpy(GOLDEN[name]))


def test_golden_values_of_blackhole() -> None:
    """All settings of the file. Wormhole differs where a sum is -1 in the last place."""
    names = [name for name in BLACKHOLE.files if name not in ("act", "weight")]
    assert len(names) == 72
    differing = dict.fromkeys((False, True), 0)
    for name in names:
        for sign_error in differing:
            act, weight, settings = golden_case(name, BLACKHOLE)
            found = matmul(act, weight, replace(settings, sign_error=sign_error)).numpy()
            wanted = np.ascontiguousarray(BLACKHOLE[name])
            differing[sign_error] += int((found.view(np.int32) != wanted.view(np.int32)).sum())
    assert differing == {False: 0, True: 1367}


def test_infinities_of_both_signs_in_l1_leave_a_number() -> None:
    """Partial sums of inf, -inf and 0 in three blocks, then a block that starts from the NaN."""
    act, weight = torch.ones(1, 128), torch.zeros(128, 1)
    weight[:64:32, 0] = torch.tensor([3e38, -3e38])
    act[0, :64:32] = 3e38
    for fp32_dst in (True, False):
        settings = MatmulSettings(1, fp32_dst, l1_acc=True, k_block=32, out_format="fp32")
        for last in (0.0, -3e38):
            act[0, 96], weight[96, 0] = 1.0, last
            operands = act.bfloat16(), weight.bfloat16()
            assert same_bits(matmul(*operands, settings), slow_matmul(*operands, settings))


@pytest.mark.parametrize("name", NAMES[::6])
def test_golden_values_of_the_slow_model(name: str) -> None:
    differing = slow_matmul(*golden_case(name, GOLDEN)).numpy() != GOLDEN[name]
    assert int(differing.sum()) == 0


@given(
    settings=all_settings(),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 150), st.integers(1, 70)),
    seed=st.integers(0, 10**6),
)
def test_any_operands_as_in_the_slow_model(
    settings: MatmulSettings, kinds: tuple[str, str], size: tuple[int, int, int], seed: int
) -> None:
    num_rows, num_k, num_n = size
    act = operand(kinds[0], (num_rows, num_k), seed)
    weight = operand(kinds[1], (num_k, num_n), seed + 1)
    assert same_bits(matmul(act, weight, settings), slow_matmul(act, weight, settings))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_operand_reaches_both_ways_of_summing(kind: str) -> None:
    act, weight = operand(kind, (70, 96), 1), operand("normal", (96, 130), 2)
    for settings in (LOFI, HIFI2):
        assert same_bits(matmul(act, weight, settings), slow_matmul(act, weight, settings))


def test_a_sum_of_minus_one_unit_keeps_the_error_of_the_unit() -> None:
    """1 - (1 + 2 ** -23) in a float32 Dst becomes -16 where -2 ** -23 is meant."""
    act, weight = torch.zeros(1, 64), torch.zeros(64, 1)
    act[0, [0, 16, 32]] = torch.tensor([-1.0, 2.0**-12, 1.0])
    weight[[0, 16, 32], 0] = torch.tensor([1.0, -(2.0**-11), 1.0])
    settings = MatmulSettings(1, fp32_dst=True, l1_acc=True, k_block=64, out_format="fp32")
    got = matmul(act.bfloat16(), weight.bfloat16(), settings)
    assert float(got) == -16.0
    blackhole = replace(settings, sign_error=False)
    assert float(matmul(act.bfloat16(), weight.bfloat16(), blackhole)) == -(2.0**-23)


@pytest.mark.parametrize("settings", [LOFI, HIFI2])
def test_rows_do_not_depend_on_the_rows_beside_them(settings: MatmulSettings) -> None:
    act, weight = operand("normal", (130, 200), 3), operand("normal", (200, 100), 4)
    together = matmul(act, weight, settings)
    for row in (0, 1, 63, 64, 129):
        assert same_bits(matmul(act[row : row + 1], weight, settings), together[row : row + 1])


@pytest.mark.parametrize("settings", [LOFI, HIFI2])
def test_zeros_around_the_operands_change_nothing(settings: MatmulSettings) -> None:
    act, weight = operand("normal", (3, 50), 5), operand("normal", (50, 21), 6)
    padded = torch.nn.functional.pad(act, (0, 14)), torch.nn.functional.pad(weight, (0, 11, 0, 14))
    assert same_bits(matmul(act, weight, settings), matmul(*padded, settings)[:, :21])


@pytest.mark.parametrize("out_format", ["bf16", "bfp8"])
def test_batches_and_strides(out_format: str) -> None:
    """Heads that share a key in place: transposed, cut from a larger cache, broadcast."""
    settings = MatmulSettings(2, fp32_dst=False, l1_acc=False, k_block=32, out_format=out_format)
    queries = operand("normal", (2, 3, 4, 64), 7)
    cache = operand("normal", (2, 1, 90, 80), 8)
    keys = cache[:, :, 5:75, 3:67].transpose(-1, -2)
    got = matmul(queries, keys, settings)
    assert got.shape == (2, 3, 4, 70)
    for sequence in range(2):
        for head in range(3):
            want = slow_matmul(queries[sequence, head], keys[sequence, 0], settings)
            assert same_bits(got[sequence, head], want)
    plain = matmul(queries, keys[0, 0], settings)
    assert same_bits(plain[1, 2], slow_matmul(queries[1, 2], keys[0, 0], settings))


def test_threads_share_the_work_and_change_nothing() -> None:
    act, weight = operand("normal", (70, 256), 9), operand("normal", (256, 300), 10)
    alone = matmul(act, weight, LOFI)
    torch.set_num_threads(3)
    assert same_bits(matmul(act, weight, LOFI), alone)


def test_partial_sums_in_the_output_format_are_rounded_at_each_block() -> None:
    act, weight = operand("normal", (4, 128), 11), operand("normal", (128, 32), 12)
    one, four = (
        MatmulSettings(1, fp32_dst=False, l1_acc=False, k_block=size, out_format="bfp8")
        for size in (128, 32)
    )
    assert not same_bits(matmul(act, weight, one), matmul(act, weight, four))
    assert same_bits(matmul(act, weight, four), slow_matmul(act, weight, four))


def test_empty_products() -> None:
    assert matmul(operand("normal", (0, 32), 1), operand("normal", (32, 5), 1), LOFI).shape == (
        0,
        5,
    )


def test_a_named_fidelity_is_its_settings() -> None:
    got = MatmulSettings.of("hifi4fp32", k_block=64, out_format="bf16")
    want = MatmulSettings(4, fp32_dst=True, l1_acc=True, k_block=64, out_format="fp32")
    assert got == want


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_phases": 5}, "phases 5; allowed: 1"),
        ({"k_block": 40}, "K block 40; allowed: multiples of 32"),
        ({"k_block": 0}, "K block 0; allowed"),
        ({"out_format": "q80"}, "output format q80; allowed: fp32"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(CompileError, match=said):
        replace(LOFI, **wrong)


@pytest.mark.parametrize(
    ("act", "weight", "said"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 4).bfloat16(), "type of act torch.float32"),
        (torch.zeros(2, 3).bfloat16(), torch.zeros(4, 4).bfloat16(), r"\[2, 3\] x \[4, 4\]"),
        (torch.zeros(3).bfloat16(), torch.zeros(3, 4).bfloat16(), "shape of act"),
        (torch.zeros(2, 1, 3).bfloat16(), torch.zeros(3, 3, 4).bfloat16(), "shapes"),
        (torch.zeros(1, 3).bfloat16(), torch.zeros(2, 3, 4).bfloat16(), "shapes"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    act: torch.Tensor, weight: torch.Tensor, said: str
) -> None:
    with pytest.raises(CompileError, match=said):
        matmul(act, weight, LOFI)
