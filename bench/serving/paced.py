"""A server without a model, of the null target at a given pace; a process for each of its halves.

``paced.py front SEATS STEPS ENGINES --host HOST --port PORT`` serves, and starts the others.
Imports no ``bench``, so that it runs as a file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.serve.engines.client import TOKENIZER
from tilewright.serve.web.server_log import tell

CONTEXT, VOCABULARY = 4096, 256


def front(seats: str, steps: str, engines: str, *where: str) -> int:
    """Serve until a signal; returns the exit code."""
    from tilewright.serve.web.server import serve
    from tilewright.serve.web.settings import Replica, Settings

    command = [__file__, "engine", "{}", seats, steps]
    settings = Settings(port=int(where[-1]), replicas=(Replica(),) * int(engines))
    return serve(settings, command, _load, on_listening=lambda port: tell(f"port {port}"))


def _load(folder: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(folder))


def engine(folder: str, seats: str, steps: str) -> int:
    """Answer what comes, a token for each seat ``steps`` times a second at most."""
    from tilewright.compiler.targets.contract.record import NumericContract
    from tilewright.compiler.targets.interface.base import CompileOptions, Step
    from tilewright.compiler.targets.interface.step import Part
    from tilewright.compiler.targets.null import NullExecutable
    from tilewright.runtime.service import EngineService
    from tilewright.serve.engines.sockets import SocketTransport

    class Paced(NullExecutable):
        """Decodes no faster than it is told to."""

        due = 0.0

        def _run_decode(self, step: Step) -> Part:
            now = time.perf_counter()
            if self.due > now:
                time.sleep(self.due - now)
            self.due = max(self.due, now) + 1 / float(steps)
            return super()._run_decode(step)

    transport = SocketTransport(Path(folder))
    byte_tokenizer(VOCABULARY, "null").save(Path(folder) / TOKENIZER)
    options = CompileOptions(max_batch=int(seats), max_context=CONTEXT)
    service = EngineService(Paced(VOCABULARY, options, NumericContract((), ())), transport)
    transport.send([service.ready({"name": "null", "target": "null"})])
    try:
        service.run()
    finally:
        transport.close()
    return 0


if __name__ == "__main__":
    run = front if sys.argv[1] == "front" else engine
    sys.exit(run(*sys.argv[2:]))
