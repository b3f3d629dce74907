"""Where a measurement was taken: library versions, commit, host, time.

Reads package metadata without importing the packages; the commit is this checkout's, if it is one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import socket
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

PACKAGES = ("tilewright", "torch", "onnx", "onnxruntime", "numpy", "tokenizers", "triton")
_CHECKOUT = Path(__file__).resolve().parents[2]
_GIT_SECONDS = 10
_SOURCES = (".py", ".yaml", ".toml", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """The fields of the same names of a Result."""

    versions: dict[str, str]
    commit: str | None
    host: str
    timestamp: str


def environment(packages: Sequence[str] = PACKAGES, *, hash_host: bool = False) -> Environment:
    """The environment of a measurement taken now.

    Args:
        packages: distributions whose versions are noted; one that is not installed is left out.
        hash_host: keep twelve hex digits of the host name's SHA-256 instead of the name.
    """
    host = socket.gethostname()
    if hash_host:
        host = hashlib.sha256(host.encode()).hexdigest()[:12]
    return Environment(versions=versions(packages), commit=commit(), host=host, timestamp=now())


def now() -> str:
    """The time, ISO 8601 with an offset."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(checkout: Path = _CHECKOUT) -> str | None:
    """The commit of a checkout, ``-dirty`` appended where files differ from it, or where sources
    lie there that git neither tracks nor ignores.

    None where git is missing or the folder is not the top of a checkout: an installed copy may lie
    inside some other repository, whose commit would say nothing.
    """
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != checkout.resolve():
        return None
    head = _git(checkout, "rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    # measuring writes these two; they do not change what is measured
    outputs = (":!results", ":!PERF.md")
    status = _git(checkout, "status", "--porcelain", "--untracked-files=all", "--", ".", *outputs)
    is_clean = status is not None and not any(map(_is_change, status.splitlines()))
    return head if is_clean else f"{head}-dirty"


def _is_change(line: str) -> bool:
    """Whether a line of git's status is of what code is made of: of untracked files, sources."""
    return not line.startswith("??") or line.rstrip('"').endswith(_SOURCES)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
