"""A terminal session from `git clone` to a chat of three turns, really run and recorded.

``python bench/record_session.py --output FILE`` writes the recording, FILE.cast (asciicast version
2, which `asciinema play` shows), and puts its text with times into FILE.md, between two markers.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_BEGIN, _END = "<!-- session -->\n", "<!-- end of session -->\n"
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")
_SHELL, _CHAT = "$ ", "> "
_COLUMNS, _LINES = 100, 30
_WIDEST = 97


@dataclass(frozen=True, slots=True)
class Typed:
    """A line that is typed once ``after``, a prompt, stands at the end of the screen."""

    after: str
    line: str


@dataclass(frozen=True, slots=True)
class Session:
    """What the screen was told, ``(seconds, text)``, and when each line was typed."""

    events: list[tuple[float, str]] = field(default_factory=list)
    typed_at: list[float] = field(default_factory=list)


def script(make: Sequence[str], questions: Sequence[str]) -> list[Typed]:
    """The session: clone, make, chat, leave; the shell knows where to clone from."""
    shell = ['git clone -q "$TILEWRIGHT" tilewright', "cd tilewright"]
    shell += [" ".join(["make demo", *make]), ". .venv/bin/activate", "tilewright chat"]
    lines = [Typed(_SHELL, line) for line in shell]
    lines += [Typed(_CHAT, question) for question in (*questions, "/quit")]
    return [*lines, Typed(_SHELL, "exit")]


def record(
    lines: Sequence[Typed], environment: dict[str, str], *, folder: str, timeout: float
) -> Session:
    """Run a shell on a terminal of its own, in ``folder``, and type ``lines`` into it.

    Raises:
        TimeoutError: where a prompt does not come.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--norc", "--noprofile"], {**os.environ, **environment})
    session, started, seen = Session(), time.monotonic(), ""
    try:
        for line in lines:
            deadline = time.monotonic() + timeout
            while not _ESCAPE.sub("", seen).endswith(line.after):
                failed = line.after != _SHELL and _ESCAPE.sub("", seen).endswith(f"\n{_SHELL}")
                if failed or time.monotonic() > deadline:
                    raise TimeoutError(f"{line.line!r}: no prompt {line.after!r} after {seen!r}")
                seen += _take(terminal, session, started).strip("\0")
            session.typed_at.append(time.monotonic() - started)
            os.write(terminal, line.line.encode() + b"\n")
            seen = ""
        while _take(terminal, session, started):
            pass
    except OSError:
        pass  # the terminal has gone with its shell
    finally:
        os.close(terminal)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return session


def _take(terminal: int, session: Session, started: float) -> str:
    if not select.select([terminal], [], [], 1.0)[0]:
        return "\0"  # nothing yet, which is no end
    text = os.read(terminal, 65536).decode(errors="replace")
    session.events.append((time.monotonic() - started, text))
    return text


def cast(session: Session) -> str:
    """Render the session as an asciicast, JSON lines of what appeared when."""
    head = {
        "version": 2,
        "width": _COLUMNS,
        "height": _LINES,
        "timestamp": int(time.time()),
        "title": "Tilewright: from git clone to a chat",
    }
    lines = [head, *([round(at, 3), "o", text] for at, text in session.events)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def plain(session: Session) -> str:
    """The session as text: each line as it stood in the end, those typed with their times."""
    text = "".join(each for _, each in session.events).replace("\0", "")
    shown, times = [], iter(session.typed_at)
    for line in _ESCAPE.sub("", text).replace("\r\n", "\n").split("\n"):
        kept = [part for part in line.split("\r") if part.strip()]
        line = kept[-1].rstrip() if kept else ""
        at = next(times, None) if line.startswith((_SHELL, _CHAT)) else None
        if at is not None:
            shown.append(f"{line:<{_WIDEST - 8}} {int(at) // 60:02}:{at % 60:04.1f}")
        else:
            shown.append(line)
    return "\n".join(shown).strip() + "\n"


def main() -> int:
    """Record a session and write its files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", default=str(_ROOT), help="what is cloned (default: this tree)")
    parser.add_argument("--make", nargs="*", default=[], help="settings of make, as NAME=VALUE")
    parser.add_argument("--output", type=Path, required=True, help="FILE.cast and FILE.md")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one command")
    questions = ["Hello! Who are you?", "What is the capital of France?", "And of Italy?"]
    parser.add_argument("--ask", nargs="+", default=questions, help="the turns of the chat")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PS1": _SHELL, "TERM": "xterm-256color"}
        environment |= {"TILEWRIGHT": options.source, "TILEWRIGHT_CACHE": f"{folder}/cache"}
        environment |= {"VIRTUAL_ENV_DISABLE_PROMPT": "1"}
        environment |= {"COLUMNS": str(_COLUMNS), "LINES": str(_LINES)}
        lines = script(options.make, options.ask)
        session = record(lines, environment, folder=folder, timeout=options.timeout)
    output = Path(options.output)
    output.with_suffix(".cast").write_text(cast(session), encoding="utf-8")
    text = f"{_BEGIN}```text\n{plain(session)}```\n{_END}"
    page = output.with_suffix(".md")
    old = page.read_text(encoding="utf-8") if page.exists() else _BEGIN + _END
    before, _, rest = old.partition(_BEGIN)
    page.write_text(before + text + rest.partition(_END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
