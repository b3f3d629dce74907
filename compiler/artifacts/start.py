"""The start index: model facts and program keys, found by file digests.

Commands ask it before they build a model, so a cached program starts without torch. The caller
lists the files and writes the tokenizer. No checkpoint formats here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.digests import (
    file_digest,
    remembered_digest,
    sources_digest,
    write_whole,
)
from tilewright.compiler.artifacts.loading import load_part
from tilewright.compiler.artifacts.manifest import FileFacts, ModelFacts
from tilewright.compiler.precision import PrecisionConfig, PrecisionSummary
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, check_options
from tilewright.compiler.targets.table import get_target
from tilewright.errors import TilewrightError, one_line
from tilewright.utils.environment import versions
from tilewright.utils.files import cache_dir, read_regular

MAX_BYTES = 1 << 30
"""Maximum total size of files with unknown digests that are hashed before a model is opened."""
_FORMAT = 1
_KEY_DIGITS = 32
_MAX_RECORDS = 64
_RECORD, _TOKENIZER = ".json", ".tokenizer"


class DamagedStartError(TilewrightError):
    """A damaged file of the index."""


class StartProgram(msgspec.Struct, frozen=True):
    """A cached program: ``key`` in the cache, `config_key`, and the configuration on the model."""

    key: str
    config: str
    precision: PrecisionSummary


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Model facts needed by commands before a program runs.

    ``stored_types``: see `tilewright.models.quantised_types`. ``contexts``: context lengths of the
    programs, ascending. ``tokenizer``: size and hash of the tokenizer file. ``programs``: cached
    programs by `choice_key`.
    """

    model: ModelFacts
    num_parameters: int
    stored_types: tuple[str, ...]
    contexts: tuple[int, ...]
    tokenizer: FileFacts
    programs: dict[str, StartProgram] = {}

    def precision_of(self, precision: PrecisionConfig) -> PrecisionSummary | None:
        """Return a configuration on this model if a program is known."""
        config = config_key(precision)
        found = (each.precision for each in self.programs.values() if each.config == config)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Start:
    """A record with its ``key`` and its tokenizer file."""

    key: str
    record: StartRecord
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class StartIndex:
    """The start index of the cache in ``root``. It evicts the least recently used records."""

    root: Path

    @classmethod
    def default(cls) -> StartIndex:
        """Return the index in :func:`cache_dir`."""
        return cls(cache_dir())

    @property
    def memory(self) -> Path:
        """Folder for remembered file digests."""
        return self.root / "digests"

    def key_of(self, name: str, files: Sequence[Path], *, max_bytes: int = 0) -> str | None:
        """Return a model's key: ``name`` of its file or folder, file digests, code version.

        Files without a remembered digest are read, up to ``max_bytes`` in all. Return None without
        files, for larger files, and for unreadable files.
        """
        try:
            known = [remembered_digest(path, self.memory) for path in files]
            unknown = [path for path, each in zip(files, known, strict=True) if each is None]
            if not files or sum(path.stat().st_size for path in unknown) > max_bytes:
                return None
            names = [
                [path.name, each or file_digest(path, self.memory)]
                for path, each in zip(files, known, strict=True)
            ]
        except (OSError, ValueError):
            return None
        return _hash([_FORMAT, name, names, _code()])

    def record(self, key: str) -> StartRecord | None:
        """Return the record of ``key``, or None.

        Raises:
            DamagedStartError: the file is damaged.
        """
        path = self._path(key, _RECORD)
        try:
            return msgspec.json.decode(read_regular(path), type=StartRecord)
        except OSError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedStartError(f"{path}: damaged ({one_line(error)}); made again") from None

    def find(self, key: str) -> Start | None:
        """Return `record` and its tokenizer file after a check of both.

        Raises:
            DamagedStartError: a file is damaged, or the tokenizer file is missing.
        """
        record = self.record(key)
        if record is None:
            return None
        path = self._path(key, _TOKENIZER)
        try:
            sound = path.stat().st_size == record.tokenizer.num_bytes
            sound = sound and file_digest(path, self.memory) == record.tokenizer.sha256
        except OSError:
            sound = False
        if not sound:
            raise DamagedStartError(f"{path}: not the written file; made again")
        with contextlib.suppress(OSError):
            os.utime(self._path(key, _RECORD))
        return Start(key, record, path)

    def keep(
        self,
        key: str,
        make: Callable[[], tuple[StartRecord, bytes]],
        choice: str,
        program: StartProgram,
    ) -> None:
        """Add a program to the record of ``key``.

        ``make`` returns record and tokenizer file if the index has no sound ones. Write errors are
        ignored.
        """
        programs: dict[str, StartProgram] = {}
        start = None
        with contextlib.suppress(DamagedStartError):
            known = self.record(key)
            programs = {} if known is None else known.programs
            start = self.find(key)
        if start is None:
            record, tokenizer = make()
            facts = FileFacts(len(tokenizer), hashlib.sha256(tokenizer).hexdigest())
            record = msgspec.structs.replace(record, tokenizer=facts)
            write_whole(self._path(key, _TOKENIZER), tokenizer)
        else:
            record = start.record
            if programs.get(choice) == program:
                return
        record = msgspec.structs.replace(record, programs={**programs, choice: program})
        write_whole(self._path(key, _RECORD), msgspec.json.encode(record))
        self._make_room()

    def files(self) -> dict[str, list[Path]]:
        """Return every record's files by its key. Empty if the index is not there."""
        found: dict[str, list[Path]] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.iterdir()):
                if path.suffix in (_RECORD, _TOKENIZER):
                    found.setdefault(path.stem, []).append(path)
        return found

    def remove(self, key: str) -> None:
        """Remove a record and its tokenizer file.

        Raises:
            OSError: a file cannot be removed.
        """
        for suffix in (_RECORD, _TOKENIZER):  # a record without a tokenizer file is damaged
            self._path(key, suffix).unlink(missing_ok=True)

    def forget(self, program: str) -> None:
        """Remove a program from all records, and the records without another program.

        Raises:
            OSError: a file cannot be removed.
        """
        for key in self.files():
            record = None
            with contextlib.suppress(DamagedStartError):
                record = self.record(key)
            if record is None:
                continue
            kept = {name: each for name, each in record.programs.items() if each.key != program}
            if not kept:
                self.remove(key)
            elif len(kept) < len(record.programs):
                record = msgspec.structs.replace(record, programs=kept)
                write_whole(self._path(key, _RECORD), msgspec.json.encode(record))

    @property
    def _folder(self) -> Path:
        return self.root / "starts"

    def _path(self, key: str, suffix: str) -> Path:
        return self._folder / f"{key}{suffix}"

    def _make_room(self) -> None:
        with contextlib.suppress(OSError):
            kept = sorted(
                self.root.glob(f"starts/*{_RECORD}"), key=lambda each: each.stat().st_mtime
            )
            for path in kept[:-_MAX_RECORDS]:
                path.unlink(missing_ok=True)
                path.with_suffix(_TOKENIZER).unlink(missing_ok=True)


def choice_key(
    precision: PrecisionConfig, contexts: Sequence[int], *, target: str, options: CompileOptions
) -> str:
    """Return a program key within its model: target, arithmetic, configuration, context."""
    longest = max(contexts)
    context = next((each for each in contexts if options.max_context <= each), longest)
    parts: list[Any] = [target, options.compute, config_key(precision), context]
    if options.parallel.tensor > 1:
        settled = get_target(target).settled(options)
        parts += [settled.tensor, settled.expert, settled.shares, settled.wire, options.rank]
    return _hash(parts)


def config_key(precision: PrecisionConfig) -> str:
    """Return a key for a configuration."""
    return _hash([repr(precision)])


@functools.cache
def _code() -> list[Any]:
    """Return Tilewright's and its libraries' versions, read once per process."""
    return [sources_digest(), versions()]


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]


def load_started(
    start: Start,
    precision: PrecisionConfig,
    cache: ProgramCache,
    *,
    target: str,
    options: CompileOptions,
    progress: Progress,
) -> Compiled | None:
    """Load a cached program without building its model. Return None if there is no sound program.

    Raises:
        ConfigError, CompileError: the program does not serve these options.
    """
    record = start.record
    check_options(options, record.model.max_positions)
    choice = choice_key(precision, record.contexts, target=target, options=options)
    program = record.programs.get(choice)
    if program is None:
        return None
    with cache.existing(program.key, wait=lambda: progress("waiting", 0, 1)) as found:
        if found is None:
            return None
        compiled = load_part(*found, options, progress)
    return replace(compiled, precision=program.precision)
