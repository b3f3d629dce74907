"""Rows in a Parquet file with a prompt column."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.batch.dataset import check_size, file_hash, spent
from tilewright.batch.plain_rows import Asking
from tilewright.batch.records import Item, Record
from tilewright.errors import ConfigError, one_line

if TYPE_CHECKING:
    import pyarrow

_ROWS = 1024  # rows per write


class ParquetRows:
    """Prompts in a Parquet file. The output has all input columns and the answers.

    Raises:
        ConfigError: without pyarrow, or for a file without such a column.
    """

    suffixes: tuple[str, ...] = (".parquet",)
    name = "Parquet"

    def __init__(self, path: Path, asking: Asking) -> None:
        self.content_hash = file_hash(path)
        self._path, self._asking = path, asking
        parquet = _library()
        try:
            self._file = parquet.ParquetFile(path)
            asking.check_columns(self._file.schema_arrow.names, str(path))
            self._prompts = self._file.read(columns=[asking.prompt_column])[0]
        except ConfigError:
            raise
        except Exception as error:  # pyarrow raises many types
            raise ConfigError(f"data set {path}: no Parquet file: {one_line(error)}") from None

    def __len__(self) -> int:
        return len(self._prompts)

    def length(self, row: int) -> int:
        """Return the maximum output tokens, which are equal for all rows."""
        return self._asking.max_tokens

    def item(self, row: int) -> Item:
        """Return a row's request. Raises ApiError 400 for an invalid prompt."""
        place = f"{self._path}: row {row + 1}"
        item = self._asking.item(row, self._prompts[row].as_py(), self._asking.max_tokens, place)
        check_size(place, len(item.body))
        return item

    def write(self, path: Path, records: Iterable[Record]) -> None:
        """Write the input columns and the answer columns. ``error`` is null without an error.

        Raises:
            OSError: if the file cannot be written.
        """
        import pyarrow

        parquet, table, source = _library(), self._file.read(), iter(records)
        types = (pyarrow.string(),) * 2 + (pyarrow.int64(),) * 2 + (pyarrow.string(),)
        fields = list(zip(self._asking.added(), types, strict=True))
        schema = table.schema
        for name, dtype in fields:
            schema = schema.append(pyarrow.field(name, dtype))
        with parquet.ParquetWriter(path, schema) as writer:
            while found := list(islice(source, _ROWS)):
                part = table.take([each.row for each in found])
                writer.write_table(self._joined(part, found, fields).cast(schema))

    def num_failed(self, path: Path) -> int:
        """Return the number of rows with a non-null ``error``."""
        try:
            (errors,) = _library().ParquetFile(path).read(columns=["error"])
        except ConfigError:
            raise
        except Exception as error:  # pyarrow raises many types
            said = f"is there already, and no output of a batch: {one_line(error)}"
            raise ConfigError(f"--output {path}: {said}; allowed: a new file") from None
        return len(errors) - int(errors.null_count)

    def _joined(
        self,
        part: pyarrow.Table,
        records: list[Record],
        fields: list[tuple[str, Any]],
    ) -> pyarrow.Table:
        import pyarrow

        added = [spent(each, self._asking.answer_column) for each in records]
        for columns, each in zip(added, records, strict=True):
            columns["error"] = None if each.is_ok else each.error()["message"]
        for name, dtype in fields:
            part = part.append_column(name, pyarrow.array([one[name] for one in added], dtype))
        return part


def _library() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("Parquet needs pyarrow; allowed: pip install pyarrow") from None
    return parquet
