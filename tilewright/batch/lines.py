"""Line files, read line by line without a limit on number or length."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from tilewright.errors import ConfigError
from tilewright.utils.files import open_regular

_CHUNK = 1 << 20
_MARK = b"\xef\xbb\xbf"  # byte order mark from some editors


class LineFile:
    """Nonblank lines of a file, numbered from 0. The file is scanned once and read on demand.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._ends, self._numbers = array("Q"), array("Q"), array("Q")
        try:
            self._file = open_regular(path)
            self._find()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"data set {path}: {reason}") from None

    def __len__(self) -> int:
        return len(self._starts)

    def size(self, index: int) -> int:
        """Return a line's number of bytes."""
        return self._ends[index] - self._starts[index]

    def place(self, index: int) -> str:
        """Return a line's location for messages, as ``data.jsonl:12``."""
        return f"{self.path}:{self._numbers[index]}"

    def __getitem__(self, index: int) -> bytes:
        start = self._starts[index]
        return os.pread(self._file.fileno(), self._ends[index] - start, start)

    def _find(self) -> None:
        """Find all lines. Only a chunk of the file is in memory."""
        at = start = number = 0
        is_blank = True
        while chunk := self._file.read(_CHUNK):
            begin = 0
            if not at and chunk.startswith(_MARK):
                begin = start = len(_MARK)
            while (end := chunk.find(b"\n", begin)) >= 0:
                number += 1
                if not is_blank or chunk[begin:end].strip():
                    self._add(start, at + end, number)
                begin, start, is_blank = end + 1, at + end + 1, True
            is_blank = is_blank and not chunk[begin:].strip()
            at += len(chunk)
        if not is_blank:
            self._add(start, at, number + 1)

    def _add(self, start: int, end: int, number: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._numbers.append(number)
