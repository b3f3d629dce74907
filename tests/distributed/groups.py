"""Groups of ranks for tests: followers as threads of this process, or as small processes."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tilewright.distributed.group import Follower, Leader
from tilewright.distributed.launch import LaunchedRanks, gather, gather_here, join
from tilewright.distributed.world import RankInfo, local_place

JOINED = (
    "from tilewright.distributed.launch import join\n"
    "from tilewright.distributed.world import place_of\n"
    "follower = join(place_of())\n"
)
"""How a follower's program begins."""


@contextlib.contextmanager
def thread_group(
    folder: Path, size: int, follow: Callable[[Follower, bytes], None], *, limit_s: float = 10.0
) -> Iterator[tuple[Leader, LaunchedRanks]]:
    """A group whose followers are threads that run ``follow``; what one raises is raised here."""
    place = local_place(folder, size)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        follower = join(RankInfo(rank, size, rank, place.address, place.token))
        try:
            follow(follower, place.token)
        except BaseException as error:
            errors.append(error)
            follower.fail(str(error))
        finally:
            follower.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, size)]
    for each in threads:
        each.start()
    ranks = gather(place, lambda found: {}, limit_s=limit_s)
    try:
        yield ranks.leader, ranks
    finally:
        ranks.close()
        for each in threads:
            each.join(20)
    if errors:
        raise errors[0]


def process_group(code: str, size: int = 2, *, limit_s: float = 1.5) -> LaunchedRanks:
    """A group whose followers run ``code`` with ``follower`` in it, and without torch."""
    return gather_here(size, ("-c", JOINED + code), limit_s=limit_s)


assert sys.platform == "linux", "ranks are tested where they run"
