"""Batches over several engines: Ray Data distributes rows over actors with an engine each.

Ray schedules, retries, scales and spills. A killed actor can return the same row twice. The journal
knows the finished rows and takes the first copy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from tilewright.batch.engine import FinishedRequest
from tilewright.batch.journal import BatchJournal
from tilewright.batch.records import Item, Record
from tilewright.cli.arguments.batch import BatchOptions, read_batch_options
from tilewright.compiler.devices import describe_cpu
from tilewright.errors import ConfigError, TilewrightError, one_line

if TYPE_CHECKING:
    import numpy

_BATCHES = 4
"""Minimum number of batches per actor. Short batches shorten the wait at the end."""

_SLOTS_FULL = 8
"""Maximum size of a batch, as a multiple of the slots. Slots run empty once per batch."""


class Actor:
    """An engine in a Ray process. Ray gives a killed actor's rows to another actor."""

    def __init__(self, argv: tuple[str, ...], created: int, threads: int) -> None:
        from tilewright.cli.processes.batch_engine import batch_engine, open_batch_source
        from tilewright.compiler.targets.interface.compiled import silent

        options = read_batch_options(argv)
        options = replace(options, model=options.model.changed(num_threads=threads))
        source = open_batch_source(options)
        # Open until the process ends.
        self._open = batch_engine(options, source, created=created, progress=silent)
        self._engine = self._open.__enter__()

    def __call__(self, rows: dict[str, numpy.ndarray]) -> dict[str, list[Any]]:
        """Answer a batch of rows."""
        given = zip(rows["row"], rows["is_chat"], rows["body"], strict=True)
        items = [Item(int(row), bool(is_chat), bytes(body)) for row, is_chat, body in given]
        ended = [each for turn in self._engine.run(iter(items)) for each in turn]
        return {
            "record": [msgspec.json.encode(each.record) for each in ended],
            "first_s": [each.first_s for each in ended],
            "total_s": [each.total_s for each in ended],
            "ignored": [msgspec.json.encode(each.ignored) for each in ended],
        }


def run_on_ray(
    options: BatchOptions, items: Iterator[Item | Record], count: int, journal: BatchJournal
) -> Iterator[list[FinishedRequest]]:
    """Yield blocks of finished rows from Ray actors, ``count`` rows in total.

    Raises:
        ConfigError: if Ray is not installed.
        TilewrightError: if Ray gives up.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray.data
    except ImportError:
        raise ConfigError("--engine ray needs Ray; allowed: pip install -e '.[ray]'") from None
    known: list[Item] = []
    bad: list[FinishedRequest] = []
    for each in islice(items, count):
        if isinstance(each, Item):
            known.append(each)
        else:
            bad.append(FinishedRequest(record=each))
    if bad:
        yield bad
    if not known:
        return
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield from _blocks(options, known, journal)
    except ray.exceptions.RayError as error:
        raise TilewrightError(f"Ray: {one_line(error)}; --resume continues") from None


def _blocks(
    options: BatchOptions, items: list[Item], journal: BatchJournal
) -> Iterator[list[FinishedRequest]]:
    import ray.data

    actors = options.actors
    size = -(-len(items) // (_BATCHES * actors))
    size = max(1, min(size, _SLOTS_FULL * options.slots))
    is_gpu, num_ranks = options.model.target == "cuda", options.model.grouping.parallel.tensor
    threads = options.model.config.num_threads or max(
        1, describe_cpu().num_cores // (actors * num_ranks)
    )
    # Interleaved, so that every batch has long and short rows.
    num_batches = -(-len(items) // size)
    ordered = [each for first in range(num_batches) for each in items[first::num_batches]]
    rows = [{"row": each.row, "is_chat": each.is_chat, "body": each.body} for each in ordered]
    answers = ray.data.from_items(rows, override_num_blocks=num_batches).map_batches(
        Actor,
        fn_constructor_args=(options.argv, journal.header.created, threads),
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=size,
        num_cpus=num_ranks if is_gpu else threads * num_ranks,
        num_gpus=num_ranks if is_gpu else 0,
    )
    for block in answers.iter_batches(batch_size=None, prefetch_batches=0):
        columns = (block[name] for name in ("record", "first_s", "total_s", "ignored"))
        yield [_ended(*row) for row in zip(*columns, strict=True)]


def _ended(
    record: bytes, first: float | None, total: float | None, ignored: bytes
) -> FinishedRequest:
    decoded = msgspec.json.decode(bytes(record), type=Record)
    known = msgspec.json.decode(bytes(ignored), type=tuple[str, ...])
    times = {"first_s": first, "total_s": total}
    # A numeric block contains NaN for an absent time.
    valid = {name: value for name, value in times.items() if value is not None and value == value}
    return FinishedRequest(record=decoded, ignored=known, **valid)
