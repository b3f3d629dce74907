"""A batch's output: a journal during the run, and the complete file at its end."""

from __future__ import annotations

import errno
import filecmp
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewright.batch.dataset import DataSet
from tilewright.batch.journal import BatchJournal
from tilewright.errors import ConfigError, allowed, one_line
from tilewright.utils.files import mode_of_new


class Output:
    """The output file of a batch, and its journal in the same directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal_path = path.with_name(f"{path.name}.journal")

    def check(self, data: DataSet, *, resumes: bool) -> bool:
        """Return whether rows are left. With ``resumes``, an existing output is complete.

        Raises:
            ConfigError: for a wrong suffix or an existing file.
        """
        if self.path.suffix not in data.suffixes:
            said = f"{self.path.suffix or 'no suffix'} of {data.name}"
            raise ConfigError(f"--output {self.path}: {said}; {allowed(data.suffixes)}")
        if self.journal_path.exists():
            if not resumes:
                said = "a run was stopped there; allowed: --resume, or another --output"
                raise ConfigError(f"--output {self.path}: {said}")
        elif os.path.lexists(self.path):
            if not resumes or not self.path.is_file():
                raise ConfigError(f"--output {self.path}: is there already; allowed: a new file")
            return False
        return True

    def begin(self, facts: Mapping[str, str]) -> BatchJournal:
        """Return the journal, of the interrupted run if there is one.

        Raises:
            ConfigError: if the journal is not writable, or of another batch.
        """
        if not self.journal_path.exists():
            return BatchJournal.create(self.journal_path, facts)
        journal = BatchJournal.open(self.journal_path)
        try:
            journal.check(facts)
        except ConfigError:
            journal.close()
            raise
        return journal

    def drop(self, journal: BatchJournal) -> None:
        """Remove the journal of a run without finished rows."""
        if not len(journal):
            self.journal_path.unlink(missing_ok=True)

    def finish(self, data: DataSet, journal: BatchJournal, rows: Sequence[int]) -> None:
        """Write the output of a complete journal atomically, then remove the journal.

        Raises:
            ConfigError: if the output is not writable, or exists with other contents. The journal
                is not removed.
        """
        journal.sync()
        temporary: Path | None = None
        try:
            handle, name = tempfile.mkstemp(
                dir=self.path.parent, prefix=f".{self.path.name[:40]}.", suffix=self.path.suffix
            )
            temporary = Path(name)
            os.close(handle)
            data.write(temporary, journal.records(rows))
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.chmod(mode_of_new(0o666))
            self._take_name(temporary)
        except OSError as error:
            said = error.strerror or one_line(error)
            raise ConfigError(f"--output {self.path}: {said}; --resume writes it again") from None
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        self.journal_path.unlink()

    def _take_name(self, temporary: Path) -> None:
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            # An earlier run was killed before it removed its journal.
            if not filecmp.cmp(temporary, self.path, shallow=False):
                raise OSError(errno.EEXIST, "has become another file meanwhile") from None
