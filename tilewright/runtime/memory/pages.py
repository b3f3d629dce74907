"""Whose page is whose: a pool with counts, and the prefix cache, a chain of hashes over full pages.

Knows numbers of pages alone; the bytes are the executable's. Nothing here needs a device.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_DIGEST_BYTES = 16
_PROCESS_KEY = secrets.token_bytes(16)
"""A secret of this process, so that nobody outside can make two prompts meet in one key."""


def pages_of(num_positions: int, page_size: int) -> int:
    """Count the pages that ``num_positions`` positions take, the last perhaps in part."""
    return -(-num_positions // page_size)


def chain_keys(
    tokens: Sequence[int], page_size: int, salt: str = "", made: Sequence[bytes] = ()
) -> list[bytes]:
    """A key for each full page of ``tokens``, which names the page and all that stands before it.

    ``salt`` keeps those apart who must not learn from each other's hits. ``made``: the keys of a
    sequence, made so, of which one begins with the other: they are not made again.
    """
    keys = [*made[: len(tokens) // page_size]]
    last = keys[-1] if keys else salt.encode()
    tokens = tokens[len(keys) * page_size :]
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    for end in range(page_size, len(tokens) + 1, page_size):
        page = packed[4 * (end - page_size) : 4 * end]
        digest = hashlib.blake2b(last + b"\0" + page, digest_size=_DIGEST_BYTES, key=_PROCESS_KEY)
        last = digest.digest()
        keys.append(last)
    return keys


class PagePool:
    """Pages that are free, held by so many, or cached: named by a key and held by nobody."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._variant: set[int] = set()  # named pages whose bits depend on other requests

    @property
    def num_available(self) -> int:
        """Pages that :meth:`take` could give: the free ones, and cached ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        """The number of pages that some request holds."""
        return self.num_pages - self.num_available

    def take(self, count: int) -> list[int]:
        """``count`` pages for one holder; cached ones leave the cache, least recently used first.

        There must be so many: see :attr:`num_available`.
        """
        assert count <= self.num_available, f"{count} pages of {self.num_available} are taken"
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget_name(page)
            self._counts[page] = 1
            taken.append(page)
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each of these pages, which are cached or held."""
        for page in pages:
            assert self._counts[page] or page in self._idle, f"page {page} is free"
            self._idle.pop(page, None)
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up pages; what nobody holds now is free, or stays cached until others need it.

        The last page of a chain goes first, for without it the others are still of use.
        """
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} is held by nobody"
            self._counts[page] -= 1
            if not self._counts[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def name(self, page: int, key: bytes, *, is_invariant: bool = True) -> None:
        """A held page is full of what ``key`` stands for, and is not written any more.

        ``is_invariant``: the page's bits depend on ``key`` only. Such a page takes the key of a
        page without this property.
        """
        assert self._counts[page] > 0, f"page {page} is held by nobody"
        if page in self._key_of:
            return
        before = self._page_of.get(key)
        if before is not None:
            if before not in self._variant or not is_invariant:
                return
            self._forget_name(before)
            if before in self._idle:
                del self._idle[before]
                self._free.append(before)
        self._page_of[key], self._key_of[page] = page, key
        if not is_invariant:
            self._variant.add(page)

    def _forget_name(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        self._variant.discard(page)

    def find(self, keys: Sequence[bytes], *, is_invariant: bool = False) -> list[int]:
        """The pages of the longest beginning of a chain that is cached; ``is_invariant``: only
        pages that were named so.
        """
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None or (is_invariant and page in self._variant):
                break
            found.append(page)
        return found

    def are_invariant(self, pages: Iterable[int]) -> bool:
        """Return whether the bits of all named ``pages`` depend on their keys only."""
        return self._variant.isdisjoint(pages)

    def count(self, page: int) -> int:
        """How many requests hold a page."""
        return self._counts[page]

    def forget(self) -> None:
        """Empty the prefix cache; what is held stays held, without a name."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._variant.clear()
        self._key_of.clear()
