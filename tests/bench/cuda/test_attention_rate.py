"""What measures decode attention, without a GPU: its cases, its mistakes, its table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.cuda import attention_rate
from bench.cuda.attention_rate import Case, Options, choose_cases, main, show
from tests.bench.cuda.conftest import CheckMistake


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows 0", "--rows: '0'; allowed: integers, 1 to 1024"),
        ("--formats fp32", "--formats: invalid choice: 'fp32'"),
        ("--positions 9", "--positions: '9'; allowed: integers, 10 or more"),
        (
            "--positions 438 --rows 1 2",
            "--positions 438: a table of 7 pages ends before; allowed with",
        ),
        ("--positions 448 --rows 1", "allowed with --rows 1: up to 447"),
        ("", "no GPU: nothing is measured"),
    ],
)
def test_mistakes_are_one_line_and_2(words: str, said: str, check_mistake: CheckMistake) -> None:
    check_mistake(main, words, said)


def test_rows_lie_about_a_position_and_caches_outgrow_the_l2() -> None:
    case = Case(3, "bf16", 246, 7)
    assert case.positions == [236, 246, 256] and case.num_pages == 5
    assert Case(1, "bf16", 255, 7).num_pages == 4
    # a row's four pages are 1 MB: 229 caches of one row, 4 of 64, and 128 are the most
    assert [Case(rows, "bf16", 230, 7).num_caches for rows in (1, 8, 64)] == [128, 29, 4]
    assert Case(8, "bfp8", 230, 7).num_caches == 240_000_000 // (8 * 4 * 1024 * 136) + 1


def test_the_table_has_every_case() -> None:
    options = Options(rows=(1, 64), formats=("bf16", "bfp8", "bf16"))
    cases = choose_cases(options)
    assert len(set(cases)) == 8
    text = show(options, {case: [case.width, case.num_rows / 3] for case in cases})
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]] == [
        ["8b", "free", "apart", "1", "230", "7", "7.00, 0.33", "7.00, 0.33"],
        ["8b", "free", "apart", "64", "230", "7", "7.00, 21.33", "7.00, 21.33"],
        ["8b", "free", "apart", "1", "230", "34", "34.00, 0.33", "34.00, 0.33"],
        ["8b", "free", "apart", "64", "230", "34", "34.00, 21.33", "34.00, 21.33"],
    ]
    both = Options(rows=(1,), pages=(7,), heads=("8b", "35b-a3b"), bits=("same", "free"))
    assert len(choose_cases(both)) == 8 and len(set(choose_cases(both))) == 8


@pytest.mark.parametrize("kind", attention_rate.KINDS)
def test_operands_are_of_the_case(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.compiler.formats.block_float import BLOCK_SIZE
    from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
    from tilewright.compiler.targets.cuda.kernels.attention.split import Share, Spread
    from tilewright.compiler.targets.cuda.state import pages

    assert (attention_rate.PAGE, attention_rate.BLOCK) == (pages.PAGE, BLOCK_SIZE)
    monkeypatch.setattr(native_attention, "why_not", lambda *a, **k: "")
    monkeypatch.setattr(attention_rate, "CHAIN_BYTES", 1)
    case = Case(3, kind, 246, 7)
    launches = attention_rate.Launches(case, torch.Generator().manual_seed(7))
    assert len(launches.caches) == 4 and {each.values.shape[0] for each in launches.caches} == {15}
    assert launches.tables[:, :5].flatten().sort().values.tolist() == list(range(15))
    assert launches.tables[:, 5:].eq(0).all() and launches.slots.tolist() == [2, 1, 0]
    wide = attention_rate.Launches(Case(3, kind, 246, 7, "35b-a3b"), torch.Generator())
    assert wide.caches[0].values.shape == (15, 2, 2, 64, 256) and wide.qkv.shape == (3, 20 * 256)

    def share(*case: Any, **more: Any) -> Any:
        return attention_rate.Launches(Case(*case, **more), torch.Generator())._share

    shares = [
        share(rows, kind, 246, 34, bits=bits, reaches="all")
        for rows, bits in ((4, "free"), (5, "same"), (5, "free"))
    ]
    assert [each.group_splits for each in shares] == [8, 8, 4]
    shares = [
        share(5, kind, at, 64, reaches=reaches)
        for at, reaches in ((246, "all"), (246, "apart"), (1150, "apart"), (2600, "apart"))
    ]
    assert [each.num_groups for each in shares] == [12, 1, 1, 12]
    for reaches, at in (("all", 246), ("apart", 1150)):
        spread, walked = (
            share(1, kind, at, 24, bits=bits, reaches=reaches) for bits in ("free", "walked")
        )
        assert spread == Spread(1, 1) and walked == Share(1, 8, 1)
    assert launches.qkv.shape == (3, 48 * 128) and (kind == "bfp8") == (
        launches.caches[0].exponents is not None
    )


@pytest.mark.gpu
def test_a_launch_is_timed() -> None:
    case = Case(2, "bfp8", 230, 7)
    assert 0 < attention_rate.measure(case, torch.Generator(device="cuda")) < 1000
