"""How launches of attention.cu are shared out, what they take, and that both sides agree."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
from tilewright.compiler.targets.cuda.kernels.attention.split import (
    SplitKV,
    Spread,
    choose_share,
    choose_spread,
    reaches_of,
    share_of_step,
)
from tilewright.compiler.targets.cuda.kernels.attention.table import (
    CPP,
    TRITON,
    AttentionSite,
    bind_decode,
    why_no_cpp,
)
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import ADA, FAST, HOPPER, INTERPRETER
from tilewright.compiler.targets.cuda.state.pages import PAGE, allocate_pages

LARGE = (8, 34), (32, 34), (64, 34), (256, 34), (256, 64), (256, 128), (256, 1024)
"""Rows and pages of a table."""


def test_groups_do_not_depend_on_the_batch() -> None:
    for num_kv_heads in (1, 2, 4, 8, 16):
        for num_pages in (1, 2, 3, 7, 8, 9, 32, 33, 130, 2048):
            shares = [choose_share(rows, num_kv_heads, num_pages) for rows in (1, 2, 8, 31, 64)]
            assert len({share.num_groups for share in shares}) == 1
            for share in shares:
                splits = share.num_joined * share.each_block
                assert share.num_joined in (1, 2, 4, 8)
                assert splits == 8 or (share.num_groups == 1 and splits >= num_pages)
                walked = -(-share.num_groups // share.num_begun)
                assert share.num_begun >= 1 and (walked == 1 or num_pages <= 64 * share.num_begun)
    assert choose_share(1, 8, 8) == SplitKV(1, 8, 1)
    assert choose_share(64, 8, 8) == SplitKV(1, 1, 8)
    assert [choose_share(rows, 8, 20).num_joined for rows in (4, 8, 16, 32)] == [8, 8, 2, 2]
    joined = [choose_share(rows, 8, 96).num_joined for rows in (1, 4, 7, 8, 16, 32, 64)]
    assert joined == [8, 4, 4, 4, 2, 2, 1], "rows are taken to be short"
    begun = [choose_share(rows, 8, pages).num_begun for rows, pages in LARGE]
    assert begun == [12, 6, 4, 1, 1, 2, 12]
    assert choose_share(32, 2, 20, 128) == SplitKV(1, 8, 1)
    assert choose_share(32, 2, 20, 256) == SplitKV(1, 2, 4), "half as many of twice the threads"
    assert choose_share(128, 1, 4) == SplitKV(1, 4, 1)
    assert choose_share(2, 8, 64) == SplitKV(12, 8, 1, 12)
    assert choose_share(16, 2, 64, 256) == SplitKV(16, 4, 2, 12)
    assert choose_share(64, 2, 64, 256) == SplitKV(16, 2, 4, 6)


def test_without_bits_a_block_has_one_split() -> None:
    for rows, num_kv_heads, pages in itertools.product((1, 5, 16, 64, 256), (1, 8), (3, 8, 20, 96)):
        same = choose_share(rows, num_kv_heads, pages)
        free = choose_share(rows, num_kv_heads, pages, same_bits=False)
        assert free.each_block == 1 and free.num_groups == same.num_groups
        assert free.num_joined == same.num_joined or (pages <= 32 and free.num_joined == 4)
    assert choose_share(8, 8, 20, same_bits=False) == SplitKV(1, 8, 1)
    assert choose_share(16, 8, 20, same_bits=False) == SplitKV(1, 2, 1), "two of many are faster"
    assert choose_share(32, 2, 20, same_bits=False) == SplitKV(1, 8, 1)
    assert choose_share(256, 8, 64, same_bits=False) == SplitKV(12, 1, 1, 1)


@pytest.mark.parametrize(
    ("num_pages", "expected"), [(7, (7,)), (8, (8,)), (9, (8, 9)), (32, (8, 32)), (64, (8, 32, 64))]
)
def test_launches_differ_by_the_pages_that_rows_reach(
    num_pages: int, expected: tuple[int, ...]
) -> None:
    """All but the last have one group, with the splits that it has in a longer table."""
    assert reaches_of(num_pages) == expected
    for reach, rows in itertools.product(expected[:-1], (1, 4, 64)):
        short, long = (choose_share(rows, 8, each) for each in (reach, num_pages))
        assert short.num_groups == short.num_begun == 1
        assert short.group_splits == long.group_splits == 8


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 2, 18, 256), Spread(1, 1)),
        ((4, 2, 32, 256), Spread(1, 1)),
        ((1, 2, 34, 256), Spread(16, 2)),
        ((1, 8, 32, 128), Spread(1, 1)),
        ((2, 8, 21, 128), Spread(1, 1)),
    ],
)
def test_few_rows_are_spread(sizes: tuple[int, int, int, int], expected: Spread) -> None:
    for strict in (False, True):
        assert share_of_step(*sizes, strict=strict) == expected
    assert share_of_step(*sizes, strict=True, spreads=False) == choose_share(*sizes)
    assert expected.num_groups == choose_share(*sizes).num_groups
    assert expected.group_splits == choose_share(*sizes).group_splits


@pytest.mark.parametrize(
    "sizes",
    [
        (5, 2, 18, 256),  # many rows
        (3, 8, 24, 128),  # more clusters than a GPU has room for
        (2, 8, 18, 256),
        (1, 8, 8, 128),  # a page a split
        (1, 8, 20, 128),  # short rows lose more than longer ones gain
        (2, 2, 34, 256),  # two clusters a row and head
        (1, 8, 34, 128),
        (1, 2, 65, 256),  # long tables
        (1, 2, 18, 64),  # no such kernel
    ],
)
def test_other_rows_are_not_spread(sizes: tuple[int, int, int, int]) -> None:
    assert choose_spread(*sizes) is None
    assert share_of_step(*sizes, strict=True) == choose_share(*sizes)


@pytest.mark.parametrize(("head_dim", "num_threads", "at_once"), [(128, 256, 2), (256, 512, 1)])
def test_blocks_of_few_rows_have_room(head_dim: int, num_threads: int, at_once: int) -> None:
    pages = allocate_pages(1, 2, head_dim, kind="bfp8", device=torch.device("cpu"))
    for spread in (Spread(1, 1), Spread(16, 2)):
        at = native_attention._spread_launch(spread, pages, 3)
        assert at.blocks == (16, 3, 2 * spread.num_clusters) and at.cluster == (16, 1, 1)
        assert at.num_threads == num_threads and at_once * (at.shared + 2048) < nvrtc.MOST_SHARED
        assert not native_attention._fits(spread, pages, 1, 9), "more heads than the kernel has"


def test_every_kernel_is_asked_for() -> None:
    eights = re.findall(r"ATTEND\(D, (\d)\)", _source())
    kinds = re.findall(r"KERNELS\((\w+), [A-Z]", _source().split("#define ATTEND")[1])
    made = [
        f"{way}_{kind}_{head_dim}_{count}"
        for way in re.findall(r"KERNEL\((\w+)_##name", _source())
        for kind in kinds
        for head_dim in re.findall(r"^ALL\((\d+)\)", _source(), re.M)
        for count in eights
    ]
    of_small_m = re.findall(r"^SMALL_M\((\w+), \w+, (\d+)\)", _small_m(), re.M)
    made += [f"attend_small_m_{kind}_{head_dim}" for kind, head_dim in of_small_m]
    assert sorted(made) == sorted(native_attention.SOURCE.names)
    assert sorted(native_attention.SOURCE.large_clusters) == sorted(made[-2:])


def test_arguments_are_in_the_kernel_s_order() -> None:
    text = re.sub(r"//.*", "", _source().split("struct Attend {")[1].split("};")[0])
    names = [re.findall(r"\w+$", part.strip())[0] for part in re.split(r"[,;]", text)[:-1]]
    assert names == [field[0] for field in native_attention._AttentionParams._fields_]


def test_sizes_of_both_sides_agree() -> None:
    assert f"constexpr int MOST_SPLITS = {attention_shares.MOST_SPLITS};" in _source()
    assert f"constexpr int PAGE = {PAGE}, WARPS = {native_attention._WARPS};" in _source()
    blocks, teams = Spread.num_joined, native_attention._TEAMS
    assert Spread.group_splits == attention_shares.MOST_SPLITS
    assert f"constexpr int JOINED = {blocks}, TEAMS = {teams};" in _small_m()
    assert f"constexpr int CLUSTER_SPLITS = {attention_shares.CLUSTER_SPLITS};" in _small_m()
    most = attention_shares.SHORT_PAGES // attention_shares.MOST_SPLITS
    path = native_attention.SOURCE.path.with_name("attention_tiles.cuh")
    assert f"constexpr int MOST_PAGES = {most};" in path.read_text()


def _source() -> str:
    return native_attention.SOURCE.path.read_text()


def _small_m() -> str:
    return native_attention.SOURCE.path.with_name("attention_small_m.cuh").read_text()


@pytest.mark.parametrize(
    ("kind", "head_dim", "num_heads", "num_frequencies", "why"),
    [
        ("fp32", 128, 8, 64, "pages of torch.float32"),
        ("bf16", 80, 8, 40, "head size 80"),
        ("bf16", 64, 34, 32, "34 heads over 2"),
        ("bf16", 256, 34, 32, "34 heads over 2"),
        ("bfp8", 256, 16, 32, "no GPU"),
        ("bfp8", 64, 8, 6, "6 frequencies"),
        ("bfp8", 64, 8, 8, "no GPU"),
    ],
)
def test_why_not(kind: str, head_dim: int, num_heads: int, num_frequencies: int, why: str) -> None:
    site = AttentionSite(kind, FAST, INTERPRETER, num_heads, 2, head_dim, num_frequencies)
    assert why in why_no_cpp(site)
    assert bind_decode(site) == TRITON
    on_hopper = dataclasses.replace(site, gpu=HOPPER)
    assert (bind_decode(on_hopper) == CPP) == (why == "no GPU")
    assert bind_decode(dataclasses.replace(site, gpu=ADA)) == TRITON
