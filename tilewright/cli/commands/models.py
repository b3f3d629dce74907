"""``tilewright models``: cached programs, their start records and downloads; sizes and removal."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.errors import ConfigError, TilewrightError, allowed
from tilewright.options.arguments import Parser

if TYPE_CHECKING:
    from tilewright.compiler.artifacts.cache import ProgramCache

_ID_DIGITS = 8
_REMOVE = "remove"
_REMOVAL = "remove: tilewright models remove NAME (an id or a model)"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A program or a start record in the cache, or a repository in the hub cache.

    path: Directory, or the record's path without an ending.
    id: First digits of the key. Empty for a repository.
    used_at: Last use, seconds since the epoch.
    remove: Removes the files.
    """

    path: Path
    id: str
    name: str
    kind: str
    target: str
    precision: str
    num_bytes: int
    used_at: float
    remove: Callable[[], None]

    @property
    def title(self) -> str:
        """The names under which the entry is listed."""
        return f"{self.id} ({self.name})" if self.id else self.name


def main(argv: list[str]) -> int:
    """Run ``tilewright models`` and return the exit code."""
    parser = Parser(
        prog="tilewright models",
        description="List cached programs and downloaded models, or remove them.",
    )
    parser.add_argument("verb", nargs="?", choices=(_REMOVE,), metavar=_REMOVE, help="remove NAMEs")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="an id, a model's name, or OWNER/NAME of the hub"
    )
    arguments = parser.parse_args(argv)
    from tilewright.compiler.artifacts.cache import ProgramCache

    cache = ProgramCache.default()
    found = [*_programs(cache), *_starts(cache.root), *_downloads()]
    if arguments.verb != _REMOVE:
        _print(found, cache.root)
        return 0
    if not arguments.names:
        raise ConfigError("models remove: no NAME; allowed: an id or a name of tilewright models")
    _remove(found, arguments.names)
    return 0


def _programs(cache: ProgramCache) -> list[CachedModel]:
    from tilewright.compiler.artifacts.manifest import read_manifest
    from tilewright.compiler.artifacts.paths import MANIFEST
    from tilewright.compiler.artifacts.start import StartIndex

    index, found = StartIndex(cache.root), []

    def remove(key: str) -> None:
        cache.remove(key)
        index.forget(key)

    for entry in cache.entries():
        name, target, precision = "damaged", "-", "-"
        with contextlib.suppress(TilewrightError):
            manifest = read_manifest(entry)
            name, target = manifest.model.name, manifest.target
            precision = manifest.precision.name
        with contextlib.suppress(OSError):
            files = [path.stat() for path in entry.rglob("*") if path.is_file()]
            manifest_path = entry / MANIFEST
            used_at = (manifest_path if manifest_path.exists() else entry).stat().st_mtime
            found.append(
                CachedModel(
                    path=entry,
                    id=entry.name[:_ID_DIGITS],
                    name=name,
                    kind="program",
                    target=target,
                    precision=precision,
                    num_bytes=sum(each.st_size for each in files),
                    used_at=used_at,
                    remove=functools.partial(remove, entry.name),
                )
            )
    return found


def _starts(root: Path) -> list[CachedModel]:
    from tilewright.compiler.artifacts.start import StartIndex

    index, found = StartIndex(root), []
    for key, files in index.files().items():
        name = "damaged"
        with contextlib.suppress(TilewrightError):
            record = index.record(key)
            name = name if record is None else record.model.name
        with contextlib.suppress(OSError):
            facts = [path.stat() for path in files]
            found.append(
                CachedModel(
                    path=files[0].with_suffix(""),
                    id=key[:_ID_DIGITS],
                    name=name,
                    kind="start",
                    target="-",
                    precision="-",
                    num_bytes=sum(each.st_size for each in facts),
                    used_at=facts[0].st_mtime,
                    remove=functools.partial(index.remove, key),
                )
            )
    return found


def _downloads() -> list[CachedModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):  # no directory, or a file with its name
        return []
    return [
        CachedModel(
            path=Path(each.repo_path),
            id="",
            name=each.repo_id,
            kind="download",
            target="-",
            precision="-",
            num_bytes=each.size_on_disk,
            used_at=each.last_accessed,
            remove=functools.partial(shutil.rmtree, each.repo_path),
        )
        for each in repositories
        if each.repo_type == "model"
    ]


def _print(found: Sequence[CachedModel], root: Path) -> None:
    from tilewright.cli.terminal.console import note, out, print_columns

    if not found:
        out().print(f"nothing is cached in {root}", soft_wrap=True)
        return
    rows = [
        (
            *(each.id or "-", each.name, each.kind, each.target, each.precision),
            f"{each.num_bytes / 1e6:,.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used_at)),
        )
        for each in sorted(found, key=lambda each: (each.name, each.kind, -each.used_at))
    ]
    total = sum(each.num_bytes for each in found) / 1e6
    columns = ("id", "model", "kind", "target", "precision", "size (MB)", "last use")
    print_columns(out(), [columns, *rows])
    note(out(), f"{total:,.1f} MB; programs: {root}", _REMOVAL)


def _remove(found: Sequence[CachedModel], names: Sequence[str]) -> None:
    """Remove the named entries. If one is refused, none is removed.

    Raises:
        ConfigError: for an unknown or ambiguous name, and for an entry in use.
    """
    chosen: dict[Path, CachedModel] = {}
    for name in names:
        matches = [each for each in found if name in (each.name, each.path.name)]
        if not matches and len(name) >= 4:
            matches = [each for each in found if each.id and each.path.name.startswith(name)]
        if not matches:
            known = dict.fromkeys(each.id or each.name for each in found)
            said = allowed(known, name) if known else "nothing is cached"
            raise ConfigError(f"models remove {name[:80]!r}: not in the cache; {said}")
        chosen |= {each.path: each for each in matches}
    for each in chosen.values():
        if (process := _user_of(each.path)) is not None:
            raise ConfigError(
                f"models remove: {each.title} is used by process {process}; allowed: after its end"
            )
    for each in chosen.values():
        try:
            each.remove()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"models remove: {each.title}: {reason}") from None
        print(f"removed {each.title}: {each.num_bytes / 1e6:,.1f} MB")


def _user_of(path: Path) -> int | None:
    """Return a process that maps or reads a file of a directory, or holds its lock."""
    home = path.resolve()
    prefix, lock = f"{home}/", f"{home}.lock"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if prefix in (process / "maps").read_text(errors="replace"):
                return int(process.name)
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target == lock or target.startswith(prefix):
                        return int(process.name)
    return None
