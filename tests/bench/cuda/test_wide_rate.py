"""What measures products with weights in blocks, without a GPU: its ways and its mistakes."""

from __future__ import annotations

import pytest

from bench.cuda import wide_rate
from tests.bench.cuda.conftest import CheckMistake
from tests.targets.cuda.kernels.test_native import shaped
from tilewright.compiler.targets.cuda.kernels.matmul import wide as native_wide


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokens 16", "--tokens: '16'; allowed: integers, 17 to 512"),
        ("--kinds bf16", "--kinds: invalid choice: 'bf16'"),
        ("--shapes 8192", "--shapes '8192'; allowed: as 8192x28672"),
        ("--shapes 0x64", "--shapes '0x64'; allowed: as 8192x28672"),
        ("", "no GPU"),
    ],
)
def test_mistakes_are_one_line_and_2(words: str, said: str, check_mistake: CheckMistake) -> None:
    check_mistake(wide_rate.main, words, said)


def test_every_kernel_of_a_weight_is_a_way() -> None:
    """Of one whose K is cut, those of a whole K as well."""
    names = set(native_wide.SOURCE.names)
    cut, large = shaped("bfp8", 8192, 8192), shaped("bfp8", 28672, 4096)
    found = {way.kernel(cut) for way in wide_rate.ways_of(cut)}
    assert found <= names and {name.split("_")[0] for name in found} == {"cut", "wide"}
    assert {way.kernel(large) for way in wide_rate.ways_of(large)} == {
        f"wide_bfp8_{eights}_{groups}" for eights, groups in native_wide.WAYS["wide"]
    }
