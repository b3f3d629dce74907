"""Opens a data set by its file's form."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tilewright.batch.dataset import DataSet, file_hash
from tilewright.batch.lines import LineFile
from tilewright.batch.openai_rows import OpenAiRows
from tilewright.batch.plain_rows import Asking, JsonRows, PlainRows, read_list
from tilewright.errors import ConfigError
from tilewright.serve.web.errors import ApiError

_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FORMS = "a JSON list (.json), JSON lines (.jsonl) or Parquet (.parquet)"


def open_data_set(path: Path, asking: Asking, *, is_plain: bool = False) -> DataSet:
    """Open the data set of a file.

    JSON lines with a ``custom_id`` in the first line have OpenAI's batch format, unless
    ``is_plain`` selects a prompt column.

    Raises:
        ConfigError: if the file is unreadable, damaged or empty, or if no row is readable.
    """
    found: DataSet
    if path.suffix == ".parquet":
        from tilewright.batch.parquet_rows import ParquetRows

        found = ParquetRows(path, asking)
    elif path.suffix == ".jsonl":
        lines = LineFile(path)
        _check_some(path, len(lines))
        if not is_plain and _is_openai(lines):
            found = OpenAiRows(path, lines)
        else:
            found = PlainRows(lines, file_hash(path), asking)
    elif path.suffix == ".json":
        rows = JsonRows(path, read_list(path))
        _check_some(path, len(rows))
        found = PlainRows(rows, file_hash(path), asking)
    else:
        raise ConfigError(f"data set {path}: {path.suffix or 'no suffix'}; allowed: {_FORMS}")
    _check_some(path, len(found))
    _check_readable(found, path)
    return found


def _check_some(path: Path, count: int) -> None:
    if not count:
        raise ConfigError(f"data set {path}: has no rows; allowed: at least one")


def _is_openai(lines: LineFile) -> bool:
    """Return whether the first object is a request with an id."""
    for row in range(min(len(lines), 16)):
        if lines.size(row) < 1 << 26:
            try:
                keys = _KEYS.decode(lines[row])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            return "custom_id" in keys or ("body" in keys and "url" in keys)
    return False


def _check_readable(found: DataSet, path: Path) -> None:
    """Check that a row of the data set is readable."""
    first: ApiError | None = None
    for row in range(len(found)):
        try:
            found.item(row)
            return
        except ApiError as error:
            first = first or error
    assert first is not None
    raise ConfigError(f"data set {path}: no row of it can be read; the first: {first.message}")
