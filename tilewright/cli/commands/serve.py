"""``tilewright serve``: an HTTP server, and an engine in a separate process."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.arguments.ask import ModelStatusLine
from tilewright.cli.arguments.serve import ServeOptions, read_serve_options
from tilewright.errors import ConfigError
from tilewright.serve.web.health import is_healthy
from tilewright.utils.child_process import PYTHON

if TYPE_CHECKING:
    from tilewright.models.tokenizer.tokenizer import Tokenizer

_NEEDED = ("aiohttp", "uvloop", "zmq", "prometheus_client")
_LOOK_SECONDS = 0.1
_LAST_BYTES = 4096
_ADDRESS = "tilewright: http://"
"""Start of the line with a server's address."""


def main(argv: list[str]) -> int:
    """Run ``tilewright serve`` until a signal. Return the exit code."""
    sign = ModelStatusLine()
    try:
        options = read_serve_options(argv, sign)
        return _run(options, list(options.argv), sign)
    finally:
        sign.clear()


def _run(options: ServeOptions, argv: list[str], sign: ModelStatusLine) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve needs {', '.join(missing)}; allowed: pip install -e '.[serve]' in the clone"
        )
    if options.detach:
        return _detach(options, [each for each in argv if each != "--detach"], sign)
    return _serve(options, argv, sign)


def _serve(options: ServeOptions, argv: list[str], sign: ModelStatusLine) -> int:
    from tilewright.serve.engines.replicas import replicas_of
    from tilewright.serve.web.server import serve
    from tilewright.serve.web.server_log import tell

    engines = replicas_of(
        options.server.replicas,
        options.model.target,
        options.model.grouping,
        devices=options.devices,
        threads=options.model.config.num_threads,
    )
    settings = replace(options.server, engines=engines)

    def tell_address(port: int) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        defaults = ", ".join(f"{name} {value:g}" for name, value in settings.defaults.items())
        said = f"default sampling: {defaults or 'of generation_config.json'}"
        sign.clear()
        tell(f"{_ADDRESS}{host}:{port} ({said})")

    def load(folder: Path) -> Tokenizer:
        return _load_tokenizer(folder, settings.chat_template)

    command = ["-m", "tilewright.cli.processes.serve_engine", "{}", *argv]
    return serve(settings, command, load, on_listening=tell_address)


def _load_tokenizer(folder: Path, chat_template: str | None) -> Tokenizer:
    """Load the tokenizer that the engine saved. ``chat_template`` replaces its template."""
    from tilewright.models.tokenizer.saved import saved_vocabulary
    from tilewright.models.tokenizer.tokenizer import Tokenizer

    vocabulary = saved_vocabulary(folder)
    if chat_template is not None:
        vocabulary = replace(vocabulary, chat_template=chat_template)
    return Tokenizer(vocabulary)


def _detach(options: ServeOptions, argv: list[str], sign: ModelStatusLine) -> int:
    """Start a detached server, and wait until it responds or ends."""
    path = options.log
    if path is None:
        handle, name = tempfile.mkstemp(prefix="tilewright-serve-", suffix=".log")
        os.close(handle)
        path = Path(name)
    command = [*PYTHON, "-m", "tilewright.cli.main", "serve", *argv]
    try:
        with path.open("ab") as log:
            start = log.tell()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}; allowed: a file to write") from None
    try:
        while child.poll() is None:
            # another server may have the port, so the log must also have the address
            if _listens(path, start) and is_healthy(options.server.host, options.server.port):
                sign.clear()
                print(f"tilewright: pid {child.pid}, port {options.server.port}, log {path}")
                return 0
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        raise
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _LAST_BYTES))
        sys.stderr.write(log.read().decode("utf-8", errors="replace"))
    return child.returncode or 1


def _listens(log: Path, start: int) -> bool:
    """Return whether a log has the server's address after byte ``start``."""
    with log.open("rb") as file:
        file.seek(start)
        return _ADDRESS.encode() in file.read(1 << 20)
