"""The environment of a measurement: library versions, commit, host, time.

Package metadata are read without importing packages. The commit is this checkout's.
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
    """Fields with the same names as in a Result."""

    versions: dict[str, str]
    commit: str | None
    host: str
    timestamp: str


def environment(packages: Sequence[str] = PACKAGES, *, hash_host: bool = False) -> Environment:
    """Return the current environment.

    Args:
        packages: Distributions with a version entry. Missing distributions are omitted.
        hash_host: Replace the host name with twelve hex digits of its SHA-256.
    """
    host = socket.gethostname()
    if hash_host:
        host = hashlib.sha256(host.encode()).hexdigest()[:12]
    return Environment(versions=versions(packages), commit=commit(), host=host, timestamp=now())


def now() -> str:
    """Return the time in ISO 8601 with an offset."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(checkout: Path = _CHECKOUT) -> str | None:
    """Return a checkout's commit. ``-dirty`` marks changed files and untracked source files.

    Return None without git, or if the directory is not the top of a checkout. An installed copy may
    be inside an unrelated repository.
    """
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != checkout.resolve():
        return None
    head = _git(checkout, "rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    # Measurements write these two files. They are not measured.
    outputs = (":!results", ":!PERF.md")
    status = _git(checkout, "status", "--porcelain", "--untracked-files=all", "--", ".", *outputs)
    is_clean = status is not None and not any(map(_is_change, status.splitlines()))
    return head if is_clean else f"{head}-dirty"


def _is_change(line: str) -> bool:
    """Return whether a git status line is a changed file or an untracked source file."""
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
