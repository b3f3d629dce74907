"""The page pool with reference counts, and the prefix cache: a hash chain over full pages.

Only page numbers are stored here. The executable owns the bytes. No device is needed.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_DIGEST_BYTES = 16
_TOKEN_MASK = (1 << 32) - 1
_PROCESS_KEY = secrets.token_bytes(16)
"""A process secret, so that users cannot construct two prompts with a common hash."""


def pages_of(num_positions: int, page_size: int) -> int:
    """Return the page count for ``num_positions``. The last page may be partial."""
    return -(-num_positions // page_size)


def chain_keys(
    tokens: Sequence[int], page_size: int, salt: str = "", made: Sequence[bytes] = ()
) -> list[bytes]:
    """Return a hash for each full page of ``tokens``. A hash identifies the page and its whole
    prefix.

    A token above 32 bits has an image's digest in its high bits.

    ``salt`` separates users without a common cache. ``made`` has known hashes for a prefix, to
    avoid computing them again.
    """
    keys = [*made[: len(tokens) // page_size]]
    last = keys[-1] if keys else salt.encode()
    tokens = tokens[len(keys) * page_size :]
    has_images = max(tokens, default=0) > _TOKEN_MASK
    packed = struct.pack(
        f"<{len(tokens)}I", *([token & _TOKEN_MASK for token in tokens] if has_images else tokens)
    )
    for end in range(page_size, len(tokens) + 1, page_size):
        page = packed[4 * (end - page_size) : 4 * end]
        if has_images:
            page += repr([token >> 32 for token in tokens[end - page_size : end]]).encode()
        digest = hashlib.blake2b(last + b"\0" + page, digest_size=_DIGEST_BYTES, key=_PROCESS_KEY)
        last = digest.digest()
        keys.append(last)
    return keys


class PagePool:
    """Pages in three states: free, in use with a reference count, or cached with a hash and no
    reference.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._variant: set[int] = set()  # hashed pages with bits that depend on concurrent requests

    @property
    def num_available(self) -> int:
        """Return the page count for :meth:`take`: free pages, and cached pages without
        references.
        """
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Return the number of pages in use."""
        return self.num_pages - self.num_available

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` pages. Cached pages are evicted, least recently used first.

        ``count`` must not exceed :attr:`num_available`.
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
        """Add a reference to pages that are cached or in use."""
        for page in pages:
            assert self._counts[page] or page in self._idle, f"page {page} is free"
            self._idle.pop(page, None)
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from pages. Unused pages become free, or stay cached until needed.

        The last page in a chain is evicted first, because its prefix remains useful.
        """
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} has no reference"
            self._counts[page] -= 1
            if not self._counts[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def name(self, page: int, key: bytes, *, is_invariant: bool = True) -> None:
        """Store the hash of a full page in use. The page must not be written afterwards.

        ``is_invariant``: the page's bits depend on ``key`` only. The page then replaces a page
        without this property.
        """
        assert self._counts[page] > 0, f"page {page} has no reference"
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
        """Return the pages for a chain's longest cached prefix. ``is_invariant``: only
        invariant pages.
        """
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None or (is_invariant and page in self._variant):
                break
            pages.append(page)
        return pages

    def are_invariant(self, pages: Iterable[int]) -> bool:
        """Return whether the bits of all hashed ``pages`` depend on their hashes only."""
        return self._variant.isdisjoint(pages)

    def count(self, page: int) -> int:
        """Return a page's reference count."""
        return self._counts[page]

    def forget(self) -> None:
        """Clear the prefix cache. Pages in use remain in use, without a hash."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._variant.clear()
        self._key_of.clear()
