"""Where a batch's answers go: a journal while it runs, and the whole output when it has ended."""

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
    """The file that a batch makes, and its journal, which lies beside it until then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal_path = path.with_name(f"{path.name}.journal")

    def check(self, data: DataSet, *, resumes: bool) -> bool:
        """Whether there is anything left to do: with ``resumes`` an output that is there is done.

        Raises:
            ConfigError: for a name that the data set's form cannot have, or that is taken.
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
        """The journal to write to: that of the run that was stopped, where there is one.

        Raises:
            ConfigError: where it cannot be written, or is of another batch.
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
        """Remove the journal of a run that ended before its first row: nothing is to go on with."""
        if not len(journal):
            self.journal_path.unlink(missing_ok=True)

    def finish(self, data: DataSet, journal: BatchJournal, rows: Sequence[int]) -> None:
        """Make the output of a journal that is complete, whole or not at all; then remove it.

        Raises:
            ConfigError: where it cannot be written, or another file has taken its name; the
                journal is left.
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
            # a run that was killed between making it and removing its journal
            if not filecmp.cmp(temporary, self.path, shallow=False):
                raise OSError(errno.EEXIST, "has become another file meanwhile") from None
