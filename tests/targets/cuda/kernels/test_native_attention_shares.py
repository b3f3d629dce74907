"""How launches of attention.cu are shared out, what they take, and that both sides agree."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels import native_attention
from tilewright.compiler.targets.cuda.kernels.native_attention import Share, choose_share
from tilewright.compiler.targets.cuda.pages import PAGE, KVPages, allocate_pages

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
    assert choose_share(1, 8, 8) == Share(1, 8, 1)
    assert choose_share(64, 8, 8) == Share(1, 1, 8)
    assert [choose_share(rows, 8, 20).num_joined for rows in (4, 8, 16, 32)] == [8, 8, 2, 2]
    joined = [choose_share(rows, 8, 96).num_joined for rows in (1, 4, 7, 8, 16, 32, 64)]
    assert joined == [8, 4, 4, 4, 2, 2, 1], "rows are taken to be short"
    begun = [choose_share(rows, 8, pages).num_begun for rows, pages in LARGE]
    assert begun == [12, 6, 4, 1, 1, 2, 12]
    assert choose_share(32, 2, 20, 128) == Share(1, 8, 1)
    assert choose_share(32, 2, 20, 256) == Share(1, 2, 4), "half as many of twice the threads"
    assert choose_share(128, 1, 4) == Share(1, 4, 1)
    assert choose_share(2, 8, 64) == Share(12, 8, 1, 12)
    assert choose_share(16, 2, 64, 256) == Share(16, 4, 2, 12)
    assert choose_share(64, 2, 64, 256) == Share(16, 2, 4, 6)


def test_without_bits_a_block_has_one_split() -> None:
    for rows, num_kv_heads, pages in itertools.product((1, 5, 16, 64, 256), (1, 8), (3, 8, 20, 96)):
        same = choose_share(rows, num_kv_heads, pages)
        free = choose_share(rows, num_kv_heads, pages, same_bits=False)
        assert free.each_block == 1 and free.num_groups == same.num_groups
        assert free.num_joined == same.num_joined or (pages <= 32 and free.num_joined == 4)
    assert choose_share(16, 8, 20, same_bits=False) == Share(1, 4, 1)
    assert choose_share(256, 8, 64, same_bits=False) == Share(12, 1, 1, 1)


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
    assert sorted(made) == sorted(native_attention.SOURCE.names)


def test_arguments_are_in_the_kernel_s_order() -> None:
    text = re.sub(r"//.*", "", _source().split("struct Attend {")[1].split("};")[0])
    names = [re.findall(r"\w+$", part.strip())[0] for part in re.split(r"[,;]", text)[:-1]]
    assert names == [field[0] for field in native_attention._Attend._fields_]


def test_sizes_of_both_sides_agree() -> None:
    assert f"constexpr int MOST_SPLITS = {native_attention._MOST_SPLITS};" in _source()
    assert f"constexpr int PAGE = {PAGE}, WARPS = {native_attention._WARPS};" in _source()


def _source() -> str:
    return native_attention.SOURCE.path.read_text()


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
    pages: KVPages = allocate_pages(1, 2, head_dim, kind=kind, device=torch.device("cpu"))
    assert why in native_attention.why_not(
        pages, num_heads=num_heads, num_frequencies=num_frequencies
    )
