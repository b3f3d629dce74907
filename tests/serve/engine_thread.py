"""The engine of a server, in a thread of this process: its start costs no import of torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.cli.arguments.serve import read_serve_options
from tilewright.cli.processes import serve_engine
from tilewright.errors import TilewrightError
from tilewright.runtime.messages import EngineStartFailed
from tilewright.serve.engines.sockets import SocketTransport
from tilewright.utils.child_process import ChildExit


class EngineThread:
    """Stands for the child process with the command ``... FOLDER OPTIONS``.

    Patch `tilewright.serve.engines.process.Child` with this class.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        first = next(at for at, part in enumerate(command) if Path(part).is_dir())
        self._folder, self._argv = Path(command[first]), list(command[first + 1 :])
        self._code = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        transport = SocketTransport(self._folder)
        try:
            serve_engine._serve(self._folder, read_serve_options(self._argv), transport)
        except TilewrightError as error:
            transport.send([EngineStartFailed(" ".join(str(error).split()))])
            self._code = 2
        finally:
            transport.close()

    @property
    def pid(self) -> int:
        """Raise ProcessLookupError: there is no process to kill."""
        raise ProcessLookupError

    def poll(self) -> ChildExit | None:
        return None if self._thread.is_alive() else ChildExit(self._code, 0.0)

    def wait(self, seconds: float | None = None) -> ChildExit | None:
        deadline = time.monotonic() + (seconds or 60.0)
        self._thread.join(deadline - time.monotonic())
        return self.poll()

    def close(self) -> None:
        self._thread.join(60.0)
