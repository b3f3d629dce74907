"""Pages against a plain model: each is free, cached, or held by as many as it should be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.memory.pages import PagePool, chain_keys, pages_of

ACTIONS = st.lists(
    st.tuples(st.sampled_from(("take", "share", "name", "release", "forget")), st.integers(0, 99)),
    max_size=60,
)


@given(st.integers(1, 12), ACTIONS)
def test_a_pool_is_as_a_plain_model(num_pages: int, actions: list[tuple[str, int]]) -> None:
    pool = PagePool(num_pages)
    holders: list[list[int]] = []
    keys: dict[bytes, int] = {}
    for number, (action, choice) in enumerate(actions):
        if action == "take":
            before = {page for held in holders for page in held}
            taken = pool.take(choice % (pool.num_available + 1))
            assert not before & set(taken) and len(set(taken)) == len(taken)
            keys = {key: page for key, page in keys.items() if page not in taken}
            holders.append(taken)
        elif action == "share" and holders:
            pool.hold(holders[choice % len(holders)])
            holders.append(list(holders[choice % len(holders)]))
        elif action == "name" and holders and (held := holders[choice % len(holders)]):
            page, key = held[choice % len(held)], bytes([number])
            pool.name(page, key)
            if page not in keys.values():
                keys[key] = page
        elif action == "release" and holders:
            pool.release(holders.pop(choice % len(holders)))
        elif action == "forget" and choice > 90:
            pool.forget()
            keys = {}
        counts = Counter(page for held in holders for page in held)
        assert [pool.count(page) for page in range(num_pages)] == [
            counts[page] for page in range(num_pages)
        ]
        assert pool.num_used == len(counts)
        assert all(pool.find([key]) == [page] for key, page in keys.items())


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    keys = chain_keys(range(12), 4)
    for page, key in zip(pages, keys, strict=True):
        pool.name(page, key)
    pool.release(pages)
    assert pool.find(keys) == pages
    pool.take(2)
    assert pool.find(keys) == pages[:2]


def test_keys_name_all_that_stands_before() -> None:
    first, second = chain_keys([1, 2, 3, 4, 5], 2), chain_keys([9, 2, 3, 4], 2)
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    assert chain_keys([1, 2, 3, 4], 2) == first
    for made in ([], first[:1], first, [*first, b"longer"]):
        assert chain_keys([1, 2, 3, 4, 5], 2, made=made) == first
    assert not set(chain_keys([1, 2, 3, 4], 2, salt="theirs")) & set(first)


def test_pages_of_positions() -> None:
    assert [pages_of(count, 64) for count in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_find_invariant_skips_pages_whose_bits_depend_on_other_requests() -> None:
    pool = PagePool(4)
    keys = chain_keys(range(8), 4)
    first, second = pool.take(2), pool.take(2)
    pool.name(first[0], keys[0])
    pool.name(first[1], keys[1], is_invariant=False)
    assert pool.find(keys) == first and pool.find(keys, is_invariant=True) == first[:1]
    assert pool.are_invariant(first[:1]) and not pool.are_invariant(first)
    pool.release(first)
    pool.name(second[1], keys[1], is_invariant=False)
    assert pool.find(keys) == first, "the earlier of two equal pages keeps the key"
    pool.name(second[1], keys[1])
    assert pool.find(keys, is_invariant=True) == [first[0], second[1]]
    assert pool.num_available == 2 and sorted(pool.take(2)) == sorted(first)
