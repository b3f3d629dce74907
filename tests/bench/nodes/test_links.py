"""Machines of network namespaces: taken away whatever ends a run, and refused where none can be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bench.nodes import links
from bench.nodes.links import machines
from tilewright.compiler.errors import ConfigError


def test_a_machine_without_the_programs_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="allowed: root, with ip and tc"), machines(2, 1.0):
        pass


_IP = """#!/bin/sh
echo "$*" >> "$TOLD"
case "$1 $2" in
"netns add") : > "$FOUND/namespaces/$3" ;;
"netns del") rm -f "$FOUND/namespaces/$3" ;;
"link add") : > "$FOUND/links/$3" ;;
"link del") rm -f "$FOUND/links/$3" ;;
esac
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a false `ip` writes its arguments to; names it makes are files beside it."""
    for name, place in (("namespaces", "_NAMESPACES"), ("links", "_LINKS")):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(links, place, tmp_path / name)
    for name, script in (("ip", _IP), ("tc", "#!/bin/sh\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FOUND", str(tmp_path))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return tmp_path / "told"


def _left(told: Path) -> list[str]:
    places = (told.parent / "namespaces", told.parent / "links")
    return sorted(each.name for place in places for each in place.iterdir())


def test_what_a_larger_run_left_that_was_killed_is_taken_away(told: Path) -> None:
    for node in range(4):
        (told.parent / "namespaces" / f"twn{node}").touch()
        (told.parent / "links" / f"twnh{node}").touch()
    with machines(2, 1.0):
        assert _left(told) == ["twn0", "twn1", "twnbr", "twnh0", "twnh1"]
    assert _left(told) == []


def test_a_run_that_is_terminated_takes_its_machines_away(told: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), machines(3, 1.0):
        os.kill(os.getpid(), signal.SIGTERM)
    assert _left(told) == [] and "netns add twn2" in told.read_text()
    assert signal.getsignal(signal.SIGTERM) == before
