"""The engine process of ``tilewright serve``: a model, an executable, and a loop on a socket.

The API server starts it with the directory of the sockets and then the user's options.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.serve import ServeOptions, read_serve_options
from tilewright.cli.terminal.notes import without_details
from tilewright.compiler.sampling.params import SamplingParams, plain_names
from tilewright.errors import ConfigError, RankError, RequestError, TilewrightError
from tilewright.runtime.messages import EngineStartFailed, EngineStarting
from tilewright.serve.engines.client import TOKENIZER
from tilewright.serve.engines.sockets import SocketTransport
from tilewright.serve.web.settings import MODEL
from tilewright.utils.garbage import run_process

_REPORT_S = 0.1

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.loading.source import ModelHandle


def main(argv: list[str]) -> int:
    """Run the engine until shutdown. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API server sends the shutdown
    folder = Path(argv[0])
    transport = SocketTransport(folder)
    try:
        _serve(folder, read_serve_options(argv[1:], last_wins=True), transport)
    except RankError as error:  # the API server restarts all ranks
        print(f"tilewright: {error}", file=sys.stderr)
        return error.exit_code
    except TilewrightError as error:
        transport.send([EngineStartFailed(" ".join(str(error).split()))])
        return 2
    finally:
        transport.close()
    return 0


def _serve(folder: Path, options: ServeOptions, transport: SocketTransport) -> None:
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.api import compile, load, open_draft_model
    from tilewright.models.tokenizer.saved import save
    from tilewright.runtime.grammar.matchers import grammars_of
    from tilewright.runtime.service import EngineService
    from tilewright.runtime.speculative.config import draft_note
    from tilewright.runtime.speculative.draft_model import DraftModel

    config, report = options.model.config, _StartReport(transport)
    how: Any = {"use_cache": config.use_cache, "progress": report.progress}
    source = load(options.model.path, config=options.model, **how)
    for note in source.notes:
        report.note(note)
    # Writing a mapped file takes seconds in the engine, and saves the API server as many.
    write = save if source.tokenizer.is_mapped else type(source.tokenizer).save
    write(source.tokenizer, folder / TOKENIZER)
    draft = open_draft_model(source, options.model, progress=report.progress)
    compiled = compile(source, options.model, progress=report.progress, ends_process=True)
    for note in without_details(compiled.notes, is_verbose=options.verbose):
        report.note(note)
    executable = compiled.executable
    limits = executable.capabilities
    promises_no_bits = limits.invariant == "none" or bool(limits.invariant_rows)
    policy = config.scheduler_config(cache_output=promises_no_bits)
    without_drafts = draft_note(policy.speculative, limits)
    if without_drafts is not None:
        report.note(without_drafts)
    grammars = grammars_of(folder / TOKENIZER, source.tokenizer.eos_ids, executable.vocab_size)
    draft_model = None if draft is None else DraftModel(draft)
    engine: Any = {"grammars": grammars, "draft_model": draft_model}
    service = EngineService(executable, transport, policy=policy, **engine)
    report.progress("preparing steps", 0, 1)
    service.loop.warm_up()
    grammars.prepare()
    transport.send([service.ready(_facts(source, compiled, options))])
    with contextlib.closing(executable):
        service.run()


class _StartReport:
    """Sends a start's progress to the API server, at most ten times a second."""

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport
        self._sent, self._sent_at = "", 0.0

    def progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._sent or now - self._sent_at > _REPORT_S:
            self._sent, self._sent_at = what, now
            self._transport.send([EngineStarting(what, done, max(total, 1))])

    def note(self, text: str) -> None:
        self._transport.send([EngineStarting(" ".join(text.split()))])


def _facts(source: ModelHandle, compiled: Compiled, options: ServeOptions) -> dict[str, str]:
    """Return the served settings, for users and for the fingerprint."""
    from tilewright.loading.source import served_facts

    max_num_seqs = compiled.executable.capabilities.max_num_seqs
    invariance = options.model.config.invariance(options.model.target, max_num_seqs)
    facts = served_facts(source, compiled, invariance=invariance)
    if options.server.sampling_defaults == MODEL:
        facts["sampling"] = json.dumps(_own_sampling(source.path))
    return facts


def _own_sampling(path: object) -> dict[str, float]:
    """Return the sampling values of a checkpoint's ``generation_config.json``.

    Raises:
        ConfigError: if the file is missing or has no valid values.
    """
    file = Path(str(path)) / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        chosen = {name: found[name] for name in plain_names() if found.get(name) is not None}
        if found.get("do_sample") is False:
            chosen["temperature"] = 0.0
        if not all(isinstance(value, int | float) for value in chosen.values()):
            raise ValueError("a value is no number")
        SamplingParams(**{**chosen, "top_k": int(chosen.get("top_k", 0))})
    except (OSError, ValueError, AttributeError, TypeError, RequestError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        said = "--sampling-defaults model"
        raise ConfigError(f"{said}: {file}: {reason}; allowed: a folder with it") from None
    return chosen


if __name__ == "__main__":
    sys.exit(run_process(lambda: main(sys.argv[1:])))
