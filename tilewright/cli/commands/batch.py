"""``tilewright batch``: answer a file's rows, and write the answers to another file."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.arguments.batch import RAY, BatchOptions, read_batch_options
from tilewright.cli.terminal.periodic_status_line import PeriodicStatusLine
from tilewright.serve.web.errors import ApiError

if TYPE_CHECKING:
    from tilewright.batch.dataset import DataSet
    from tilewright.batch.engine import FinishedRequest
    from tilewright.batch.figures import Meter
    from tilewright.batch.journal import BatchJournal
    from tilewright.batch.output import Output
    from tilewright.batch.records import Item, Record
    from tilewright.cli.terminal.batch_progress import Bar
    from tilewright.loading.source import ModelHandle

EXIT_ROWS_FAILED = 1
_MOST_IGNORED = 10


def main(argv: list[str]) -> int:
    """Run ``tilewright batch``. Return 1 if a row has no answer."""
    options = read_batch_options(argv)
    with ExitStack() as stack:
        path = options.output
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = Path(folder) / f"answers{_suffix(options)}"
        return _run(options, path, stack.enter_context(PeriodicStatusLine()))


def _suffix(options: BatchOptions) -> str:
    return options.input.suffix if options.input is not None else ".jsonl"


def _run(options: BatchOptions, path: Path, sign: PeriodicStatusLine) -> int:
    import warnings

    warnings.filterwarnings("ignore", module="torch")
    from tilewright.batch.output import Output
    from tilewright.cli.processes.batch_engine import batch_facts, open_batch_source

    sign.show("opening the data set")
    data, source = _opened(options, None), None
    if data is None:
        source = open_batch_source(options)
        data = _opened(options, source)
        assert data is not None
    output = Output(path)
    if not output.check(data, resumes=options.resume):
        sign.note(f"{path} is complete already")
        return _exit_code(options, data.num_failed(path), len(_chosen(options, len(data))))
    source = source or open_batch_source(options)
    rows = _chosen(options, len(data))
    if options.num_samples is not None and options.num_samples > len(data):
        sign.note(f"{len(data):,} rows are all there are: --num-samples {options.num_samples:,}")
    facts = {"data set": data.content_hash, "samples": f"{len(rows)} of {len(data)}"}
    journal = output.begin({**facts, **batch_facts(options, source)})
    with closing(journal):
        if len(journal):
            sign.note(f"{len(journal)} of {len(rows)} rows are there already")
        try:
            meter = _answer(options, source, data, journal, rows=rows, sign=sign)
            return _end(options, output, data, journal, rows=rows, meter=meter)
        finally:
            output.drop(journal)


def _opened(options: BatchOptions, source: ModelHandle | None) -> DataSet | None:
    """Return the data set, or None if it needs a model's vocabulary and ``source`` is None."""
    from tilewright.batch.inputs import open_data_set
    from tilewright.batch.made_rows import MadeRows

    if options.input is not None:
        return open_data_set(options.input, options.asking, is_plain=options.is_plain)
    if source is None:
        return None
    assert options.num_samples and options.input_len and options.output_len
    return MadeRows(
        count=options.num_samples,
        input_len=options.input_len,
        output_len=options.output_len,
        vocabulary=source.tokenizer.num_ids,
        seed=options.seed,
    )


def _chosen(options: BatchOptions, count: int) -> list[int]:
    """Return the selected row numbers, ascending."""
    if options.num_samples is None or options.num_samples >= count:
        return list(range(count))
    return sorted(random.Random(options.seed).sample(range(count), options.num_samples))


def _answer(
    options: BatchOptions,
    source: ModelHandle,
    data: DataSet,
    journal: BatchJournal,
    *,
    rows: Sequence[int],
    sign: PeriodicStatusLine,
) -> Meter | None:
    """Answer the rows without an answer. Return None if all rows have an answer."""
    from tilewright.cli.terminal.batch_progress import Bar

    # Longest first: the last rows are short, so no slot stays empty for long.
    left = sorted((row for row in rows if row not in journal), key=data.length, reverse=True)
    if not left:
        return None
    items = _items(data, left)
    try:
        with Bar(data, left, num_done=len(rows) - len(left)) as bar:
            if options.engine_kind == RAY:
                from tilewright.cli.processes.batch_ray import run_on_ray

                sign.follow(bar.said)
                return _follow(run_on_ray(options, items, len(left), journal), journal, bar)
            return _here(options, source, items, journal, bar=bar, sign=sign)
    except KeyboardInterrupt:
        sign.note(f"stopped; {len(journal)} of {len(rows)} rows are done, --resume goes on")
        raise
    finally:
        journal.sync()


def _here(
    options: BatchOptions,
    source: ModelHandle,
    items: Iterator[Item | Record],
    journal: BatchJournal,
    *,
    bar: Bar,
    sign: PeriodicStatusLine,
) -> Meter:
    from tilewright.cli.processes.batch_engine import batch_engine

    created = journal.header.created
    with batch_engine(options, source, created=created, progress=sign.progress) as engine:
        sign.clear()
        sign.follow(bar.said)
        from tilewright.batch.figures import Meter

        meter = Meter()
        for ended in engine.run(items):
            if ended:
                meter.take(
                    ended,
                    num_steps=engine.num_steps,
                    num_decoded=engine.num_output - engine.num_first,
                )
            _keep(ended, journal)
            bar.show(ended, engine.num_output)
        return meter


def _follow(found: Iterator[list[FinishedRequest]], journal: BatchJournal, bar: Bar) -> Meter:
    from tilewright.batch.figures import Meter

    meter = Meter()
    for ended in found:
        ended = [each for each in ended if each.record.row not in journal]
        meter.take(ended)
        _keep(ended, journal)
        bar.show(ended, meter.num_output)
    return meter


def _keep(ended: Sequence[FinishedRequest], journal: BatchJournal) -> None:
    journal.add([each.record for each in ended])


def _items(data: DataSet, rows: Sequence[int]) -> Iterator[Item | Record]:
    """Yield the rows as engine requests. An unreadable row becomes a record of its error."""
    from tilewright.batch.records import refused

    for row in rows:
        try:
            yield data.item(row)
        except ApiError as error:
            yield refused(row, error)


def _end(
    options: BatchOptions,
    output: Output,
    data: DataSet,
    journal: BatchJournal,
    *,
    rows: Sequence[int],
    meter: Meter | None,
) -> int:
    output.finish(data, journal, journal.rows if options.unordered else rows)
    if meter is not None:
        print(json.dumps(meter.values()) if options.as_json else "\n".join(meter.lines()))
        _say_ignored(meter)
    return _exit_code(options, journal.num_failed, len(rows))


def _say_ignored(meter: Meter) -> None:
    """Print the ignored fields of all rows. The server reports them in a header."""
    if not meter.ignored:
        return
    most = meter.ignored.most_common(_MOST_IGNORED)
    found = [f"{ascii(key)[1:-1][:40]} ({count:,})" for key, count in most]
    if len(meter.ignored) > len(most):
        found.append("...")
    print(f"tilewright: ignored in rows' bodies: {', '.join(found)}", file=sys.stderr)


def _exit_code(options: BatchOptions, num_failed: int, num_rows: int) -> int:
    """Print the number of failed rows in a complete batch. Return the exit code."""
    if not num_failed:
        return 0
    where = "" if options.output is None else f"; their lines in {options.output} say why"
    said = f"{num_failed} of {num_rows} rows could not be answered{where}"
    print(f"tilewright: {said}", file=sys.stderr)
    return EXIT_ROWS_FAILED
