"""Generated rows for measurements: random token ids of equal length."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tilewright.batch.dataset import count_errors, encode, spent, write_json
from tilewright.batch.plain_rows import lines_of
from tilewright.batch.records import Item, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRows:
    """``count`` seeded prompts with ``input_len`` random ids below ``vocabulary``.

    Their outputs have ``output_len`` tokens.
    """

    count: int
    input_len: int
    output_len: int
    vocabulary: int
    seed: int
    name: str = "random prompts"
    suffixes: tuple[str, ...] = (".jsonl", ".json")

    @property
    def content_hash(self) -> str:
        """Return a text with all parameters of the rows, in place of a hash."""
        return f"{self.input_len} {self.output_len} {self.vocabulary} {self.seed}"

    def __len__(self) -> int:
        return self.count

    def length(self, row: int) -> int:
        """Return a row's maximum output tokens, equal for all rows."""
        return self.output_len

    def item(self, row: int) -> Item:
        """Return a row's request: a completion for random token ids."""
        draw = random.Random(f"{self.seed} {row}")
        prompt = [draw.randrange(self.vocabulary) for _ in range(self.input_len)]
        return Item(row, False, encode({"prompt": prompt, "max_tokens": self.output_len}))

    def write(self, path: Path, records: Iterable[Record]) -> None:
        """Write an object per row: its number, and its answer or ``error``."""
        write_json(path, map(_line, records), is_list=path.suffix == ".json")

    def num_failed(self, path: Path) -> int:
        """Return the number of rows with an ``error``."""
        return count_errors(lines_of(path), path)


def _line(record: Record) -> bytes:
    found = {"row": record.row + 1, **spent(record, "text")}
    return encode(found if record.is_ok else {**found, "error": record.error()["message"]})
