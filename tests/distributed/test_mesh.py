"""How axes are dealt over chips: everything once, equal shares, zeros where nothing is left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.mesh import (
    COLUMNS,
    ROWS,
    UNEVEN,
    HeadSplit,
    IndexRange,
    Mesh,
    Split,
    deal,
    in_shares,
    join,
    split_heads,
)
from tilewright.errors import CompileError

COUNTS = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query heads, key heads, chips: as many queries a key head as make enough for the chips."""
    count, num_kv_heads = draw(COUNTS), draw(st.integers(1, 12))
    group = draw(st.integers(-(-count // num_kv_heads), 12))
    return group * num_kv_heads, num_kv_heads, count


def real(split: Split) -> list[int]:
    """The positions that chips hold, chip after chip, without zeros."""
    indices = torch.cat([split.indices(rank) for rank in range(len(split.shares))])
    return [index for index in indices.tolist() if index >= 0]


def test_a_mesh_s_axes_and_names() -> None:
    galaxy = Mesh(8, 4)
    assert (galaxy.num_chips, galaxy.size(ROWS), galaxy.size(COLUMNS)) == (32, 8, 4)
    assert [str(mesh) for mesh in (Mesh(), Mesh(2), Mesh(8), galaxy)] == [
        "1x1",
        "1x2",
        "1x8",
        "8x4",
    ]
    with pytest.raises(AssertionError, match="n x 1"):
        Mesh(1, 4)


@given(st.integers(1, 300), COUNTS, st.sampled_from([1, 16, 32]))
def test_dealt_columns_come_back(size: int, count: int, unit: int) -> None:
    split = deal(size, count, unit=unit)
    assert real(split) == list(range(size)), "each once, in order"
    assert {sum(run.count for run in share) for share in split.shares} == {split.size}
    assert split.size % unit == 0
    assert split.size * count - size < count * unit, "no more zeros than equal whole units need"
    whole = torch.randn(3, size)
    parts = [split.take(whole, 1, rank) for rank in range(count)]
    assert all(part.shape == (3, split.size) for part in parts)
    together = torch.cat(parts, 1)
    assert torch.equal(together[:, :size], whole)
    assert not together[:, size:].any()


@given(st.integers(1, 70), COUNTS)
def test_a_share_is_taken_along_any_axis(size: int, count: int) -> None:
    split, whole = deal(size, count), torch.randn(size, 2, dtype=torch.float64)
    for rank in range(count):
        part = split.take(whole, 0, rank)
        assert part.dtype == torch.float64
        assert torch.equal(part, split.take(whole.t(), 1, rank).t())


def test_a_chip_may_hold_zeros_alone() -> None:
    split = deal(33, 4)
    assert split.shares[1:] == (
        (IndexRange(32, 1), IndexRange(None, 31)),
        (IndexRange(None, 32),),
        (IndexRange(None, 32),),
    )
    assert not split.take(torch.ones(33), 0, 3).any()


@given(head_counts())
def test_every_query_head_is_on_one_chip_with_its_key_head(counts: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, count = counts
    split = split_heads(num_heads, num_kv_heads, count)
    group, a_group = num_heads // num_kv_heads, split.num_heads // split.num_kv_heads
    assert split.num_heads == a_group * split.num_kv_heads, "attention sees equal groups"
    seen = []
    for queries, keys in zip(split.query_of, split.kv_of, strict=True):
        assert (len(queries), len(keys)) == (split.num_heads, split.num_kv_heads)
        for at, query in enumerate(queries):
            if query is not None:
                seen.append(query)
                assert keys[at // a_group] == query // group
    assert seen == sorted(seen), "in the model's order, which the next product's inputs have"
    assert seen == list(range(num_heads))


@given(head_counts())
def test_key_heads_are_repeated_only_where_there_are_fewer_than_chips(
    counts: tuple[int, int, int],
) -> None:
    num_heads, num_kv_heads, count = counts
    split = split_heads(num_heads, num_kv_heads, count)
    held = [key for keys in split.kv_of for key in keys if key is not None]
    assert set(held) == set(range(num_kv_heads))
    copies = {held.count(key) for key in held}
    assert len(copies) == 1
    assert copies == {1} or num_kv_heads < count


@pytest.mark.parametrize(
    ("counts", "per_chip", "query_of", "kv_of"),
    [
        ((4, 2, 1), (4, 2), ((0, 1, 2, 3),), ((0, 1),)),
        ((4, 2, 2), (2, 1), ((0, 1), (2, 3)), ((0,), (1,))),
        ((4, 2, 4), (1, 1), ((0,), (1,), (2,), (3,)), ((0,), (0,), (1,), (1,))),
        # Three key heads over two chips: a fourth, of zeros, with its queries.
        ((3, 3, 2), (2, 2), ((0, 1), (2, None)), ((0, 1), (2, None))),
        # A group of three shared by two chips: a query of zeros makes their shares equal.
        ((3, 1, 2), (2, 1), ((0, 1), (2, None)), ((0,), (0,))),
    ],
)
def test_heads_by_hand(
    counts: tuple[int, int, int],
    per_chip: tuple[int, int],
    query_of: tuple[tuple[int | None, ...], ...],
    kv_of: tuple[tuple[int | None, ...], ...],
) -> None:
    assert split_heads(*counts) == HeadSplit(*per_chip, query_of, kv_of)


def test_published_models_need_no_padding() -> None:
    """Llama 3.2 1B, 3.1 8B and 70B on the meshes that the boards' demos use."""
    for num_heads, count in ((32, 2), (32, 8), (64, 8)):
        split = split_heads(num_heads, 8, count)
        assert split.num_heads * count == num_heads
        assert split.num_kv_heads * count == 8


@given(head_counts(), st.sampled_from([8, 16, 64]))
def test_heads_columns_are_taken_and_come_back(counts: tuple[int, int, int], head_dim: int) -> None:
    num_heads, num_kv_heads, count = counts
    heads = split_heads(*counts)
    width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    queries = heads.queries(head_dim)
    assert real(queries) == list(range(width))
    merged = join(
        queries,
        heads.keys(head_dim, first=width),
        heads.keys(head_dim, first=width + kv_width),
    )
    assert merged.size == (heads.num_heads + 2 * heads.num_kv_heads) * head_dim
    assert set(real(merged)) == set(range(width + 2 * kv_width))
    whole = torch.randn(width + 2 * kv_width)
    sizes = [heads.num_heads * head_dim, *[heads.num_kv_heads * head_dim] * 2]
    for rank in range(count):
        q, k, v = merged.take(whole, 0, rank).split(sizes)
        assert torch.equal(q, queries.take(whole[:width], 0, rank))
        assert torch.equal(k, heads.keys(head_dim).take(whole[width : width + kv_width], 0, rank))
        assert torch.equal(v, heads.keys(head_dim).take(whole[width + kv_width :], 0, rank))


@given(st.integers(1, 31), st.integers(1, 4))
def test_fewer_query_heads_than_chips_are_refused(num_heads: int, more: int) -> None:
    with pytest.raises(CompileError) as caught:
        split_heads(num_heads, 1, num_heads + more)
    assert str(caught.value) == (
        f"{num_heads} query heads over {num_heads + more} chips; "
        f"allowed: meshes of at most {num_heads}"
    )


def test_joined_shares_stand_in_order() -> None:
    left, right = deal(4, 2, unit=1), deal(2, 2, unit=1)
    both = join(left, right)
    assert [both.indices(rank).tolist() for rank in (0, 1)] == [[0, 1, 0], [2, 3, 1]]


@given(st.integers(1, 300), COUNTS, st.sampled_from([1, 8, 16]), st.data())
def test_shares_without_zeros_are_whole_units(
    size: int, count: int, unit: int, data: st.DataObject
) -> None:
    shares = data.draw(st.none() | st.lists(st.integers(1, 9), min_size=count, max_size=count))
    policy = in_shares(shares) if shares else UNEVEN
    num_units = -(-size // unit)
    if num_units < count:
        with pytest.raises(CompileError, match=f"allowed: at most {num_units} ranks"):
            deal(size, count, unit=unit, policy=policy)
        return
    split = deal(size, count, unit=unit, policy=policy)
    assert split.is_in_order
    assert sum(split.sizes) == size
    units = [-(-each // unit) for each in split.sizes]
    assert sum(units) == num_units, "no unit is cut"
    assert min(units) >= 1
    if not shares:
        assert units == sorted(units, reverse=True)
        assert units[0] - units[-1] <= 1
    else:
        fair = [num_units * share / sum(shares) for share in shares]
        assert all(has < due + 1 or has == 1 for has, due in zip(units, fair, strict=True))


@given(head_counts(), st.booleans())
def test_uneven_heads_form_uniform_groups(counts: tuple[int, int, int], is_shared: bool) -> None:
    num_heads, num_kv_heads, count = counts
    policy = in_shares(range(1, count + 1)) if is_shared else UNEVEN
    split = split_heads(*counts, policy)
    assert [q for queries in split.query_of for q in queries] == list(range(num_heads))
    for queries, keys in zip(split.query_of, split.kv_of, strict=True):
        a_group, left = divmod(len(queries), len(keys))
        assert a_group >= 1
        assert not left
        for at, query in enumerate(queries):
            assert query is not None
            assert keys[at // a_group] == query // (num_heads // num_kv_heads)
    held = [key for keys in split.kv_of for key in keys]
    assert held == sorted(held)  # type: ignore[type-var]
    assert set(held) == set(range(num_kv_heads))
    assert len(held) == max(num_kv_heads, count)


@pytest.mark.parametrize(
    ("counts", "units", "query_of"),
    [
        ((6, 3, 2), (1, 1), ((0, 1, 2, 3), (4, 5))),
        ((6, 2, 5), (1, 1), ((0,), (1,), (2,), (3, 4), (5,))),
        # Heads of 80 columns in blocks of 32 are dealt in pairs.
        ((8, 8, 3), (1, 2), ((0, 1, 2, 3), (4, 5), (6, 7))),
        ((8, 4, 2), (1, 4), ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_uneven_heads_by_hand(
    counts: tuple[int, int, int], units: tuple[int, int], query_of: tuple[tuple[int, ...], ...]
) -> None:
    found = split_heads(*counts, UNEVEN, kv_unit=units[0], query_unit=units[1])
    assert found.query_of == query_of


@pytest.mark.parametrize(
    ("counts", "kv_unit", "message"),
    [
        ((4, 2, 5), 1, "4 query heads over 5 ranks; allowed: at most 4"),
        ((8, 2, 4), 2, "2 key/value heads in blocks of 2, over 4 ranks; allowed: at most 1 ranks"),
        ((8, 4, 3), 2, "4 in blocks of 2 are 2, over 3 ranks; allowed: at most 2 ranks"),
    ],
)
def test_heads_that_no_ranks_can_share_are_refused(
    counts: tuple[int, int, int], kv_unit: int, message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        split_heads(*counts, UNEVEN, kv_unit=kv_unit)
    assert str(caught.value) == message


def test_shares_in_heads_and_in_columns() -> None:
    columns = Split(((IndexRange(32, 32), IndexRange(None, 16)), (IndexRange(0, 48),)))
    heads = columns.in_units(16)
    assert heads.shares == ((IndexRange(2, 2), IndexRange(None, 1)), (IndexRange(0, 3),))
    assert heads.times(16) == columns
    assert not heads.is_in_order
