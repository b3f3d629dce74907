"""What measures products with rows as they lie, without a GPU: its ways and its mistakes."""

from __future__ import annotations

import pytest

from bench.cuda import dense_rate
from tests.bench.cuda.conftest import CheckMistake
from tests.targets.cuda.kernels.test_native import shaped
from tilewright.compiler.targets.cuda.kernels.matmul import dense as native_dense


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokens 4097", "--tokens: '4097'; allowed: integers, 1 to 4096"),
        ("--kinds bfp8", "--kinds: invalid choice: 'bfp8'"),
        ("--shapes 8192x4096", "--shapes '8192x4096': ''; allowed: store, add, swiglu"),
        ("--shapes 0x64:add", "--shapes '0x64'; allowed: as 8192x28672"),
        ("", "no GPU"),
    ],
)
def test_mistakes_are_one_line_and_2(words: str, said: str, check_mistake: CheckMistake) -> None:
    check_mistake(dense_rate.main, words, said)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("size", [(28672, 4096), (4096, 14336), (6144, 4096), (12352, 2048)])
def test_what_is_chosen_is_measured(
    size: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (native_dense, dense_rate):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
    held, is_codes = shaped("bf16", *size), kind == "e4m3"
    for count in (16, 32, 64):
        if is_codes and (count < 17 or not native_dense.takes_codes(held, count)):
            continue
        chosen = native_dense.choose_way(held, count, is_codes=is_codes)
        assert chosen in list(dense_rate.ways_of(held, kind, count))
