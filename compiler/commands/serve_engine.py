"""The engine process of ``tilewright serve``: a model, an executable, a loop on a socket.

Started by the front alone, with the folder where they meet and then the user's own options.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from tilewright.compiler.commands.serve_options import ServeOptions, read_serve_options
from tilewright.compiler.errors import TilewrightError
from tilewright.compiler.runtime.messages import Refused
from tilewright.compiler.serve.engine_client import TOKENIZER
from tilewright.compiler.serve.sockets import SocketTransport


def main(argv: list[str]) -> int:
    """Serve until told to stop; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front is told, and tells us
    folder = Path(argv[0])
    transport = SocketTransport(folder)
    try:
        _serve(folder, read_serve_options(argv[1:]), transport)
    except TilewrightError as error:
        transport.send([Refused(" ".join(str(error).split()))])
        return 2
    finally:
        transport.close()
    return 0


def _serve(folder: Path, options: ServeOptions, transport: SocketTransport) -> None:
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.compiler.commands.source import compile_source, open_source
    from tilewright.compiler.runtime.matchers import grammars_of
    from tilewright.compiler.runtime.request import Request
    from tilewright.compiler.runtime.running import Policy
    from tilewright.compiler.runtime.sampling import SamplingParams
    from tilewright.compiler.runtime.service import EngineService
    from tilewright.compiler.targets.base import CompileOptions

    source = open_source(options.model.path)
    context = min(options.context, source.max_positions)
    source.tokenizer.save(folder / TOKENIZER)
    compiled = compile_source(
        source,
        options.model,
        CompileOptions(
            max_batch=options.max_seats,
            max_context=context,
            compute=options.model.compute,
            num_threads=options.threads,
        ),
        lambda what, done, total: None,
        use_cache=not options.no_cache,
    )
    executable = compiled.executable
    policy = Policy(step_ms=options.step_ms, step_tokens=options.step_tokens)
    grammars = grammars_of(folder / TOKENIZER, source.tokenizer.eos_ids, executable.vocab_size)
    service = EngineService(executable, transport, policy=policy, grammars=grammars)
    warm = replace(SamplingParams(), max_tokens=min(3, context))
    service.loop.generate([Request(-1, (0,), warm)])
    target = options.model.target if source.manifest is None else source.manifest.target
    facts = {
        "name": source.name,
        "target": target,
        "precision": compiled.precision.heading,
        "weights": source.weights,
        "content_hash": source.content_hash,
        "device": executable.device_name,
    }
    transport.send([service.ready(facts)])
    with contextlib.closing(executable):
        service.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
