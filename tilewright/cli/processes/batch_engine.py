"""Builds a batch engine from a command line, in this process or in a Ray actor."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.api import compile, load, open_draft_model
from tilewright.batch.engine import BatchEngine
from tilewright.batch.preparing import BatchGrammarValidator, Preparer
from tilewright.cli.arguments.batch import BatchOptions
from tilewright.cli.terminal.notes import without_details
from tilewright.compiler.targets.interface.base import Progress
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.distributed.parallel import ParallelConfig
from tilewright.loading.source import (
    ARITHMETIC,
    ModelHandle,
    precision_of,
    served_facts,
)
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.runtime.grammar.matchers import grammars_of
from tilewright.runtime.service import EngineService, QueueTransport
from tilewright.runtime.speculative.config import draft_note
from tilewright.runtime.speculative.draft_model import DraftModel
from tilewright.serve.prompt.template import read_template
from tilewright.serve.tasks import Served, fingerprint_of
from tilewright.serve.web.server_log import say


def open_batch_source(options: BatchOptions) -> ModelHandle:
    """Open a batch's model with the requested tokenizer. Reads no weights."""
    use_cache = options.model.config.use_cache
    source = load(options.model.path, use_cache=use_cache, config=options.model)
    for note in source.notes:
        say(note)
    if options.tokenizer is None:
        return source
    return replace(source, tokenizer=load_tokenizer(TokenizerSource(options.tokenizer)))


def batch_facts(options: BatchOptions, source: ModelHandle) -> dict[str, str]:
    """Return the settings that determine a batch's answers, except its rows."""
    asking = options.asking
    chosen = {**options.sampling, "seed": options.seed, "max_tokens": options.max_tokens}
    grouping, ranks = options.model.grouping, dict[str, str]()
    if not grouping.is_alone:
        ranks["ranks"] = _ranks(grouping.parallel)
    return {
        "model": source.name,
        "weights": f"{source.weights} {source.content_hash}",
        "tokenizer": source.tokenizer.content_hash(),
        "target": options.model.target,
        "precision": precision_of(source, options.model.precision).heading,
        "compute": options.model.compute,
        "arithmetic": ARITHMETIC[options.model.config.batch_invariant],
        "context": str(min(options.model.config.context, source.max_positions)),
        "sampling": " ".join(f"{name}={chosen[name]}" for name in sorted(chosen)),
        "ends": "ignored" if options.ignore_eos else "the model's",
        "rows": f"{asking.prompt_column} {asking.answer_column} chat={asking.is_chat}",
        **ranks,
    }


def _ranks(parallel: ParallelConfig) -> str:
    """Return the settings of a rank group that determine the rounding of sums."""
    found = [str(parallel.tensor)]
    if parallel.expert is not None:
        found.append(f"experts in {parallel.expert} parts")
    if parallel.shares:
        found.append(f"shares {' '.join(map(str, parallel.shares))}")
    if parallel.wire is not None:
        found.append(f"{parallel.wire} sent")
    return ", ".join(found)


@contextmanager
def batch_engine(
    options: BatchOptions, source: ModelHandle, *, created: int, progress: Progress
) -> Iterator[BatchEngine]:
    """Yield a compiled and warm engine. ``created`` is the time in the answers.

    Raises:
        TilewrightError: if model, precision and target do not fit together.
    """
    draft = open_draft_model(source, options.model, progress=progress)
    compiled = compile(source, options.model, progress=progress)
    for note in without_details(compiled.notes, is_verbose=options.verbose):
        say(note)
    progress("preparing steps", 0, 1)
    with closing(compiled.executable), tempfile.TemporaryDirectory() as folder:
        draft_model = None if draft is None else DraftModel(draft)
        how: dict[str, Any] = {"created": created, "draft_model": draft_model}
        made = _made(options, source, compiled, folder=Path(folder) / "tokenizer", **how)
        gc.freeze()  # later collections skip the objects of imports and compilation
        try:
            yield made
        finally:
            gc.unfreeze()
            if draft_model is not None:
                draft_model.close()


def _made(
    options: BatchOptions,
    source: ModelHandle,
    compiled: Compiled,
    *,
    created: int,
    folder: Path,
    draft_model: DraftModel | None,
) -> BatchEngine:
    source.tokenizer.save(folder)  # grammars are compiled for the saved tokenizer
    executable, transport = compiled.executable, QueueTransport()
    grammars = grammars_of(folder, source.tokenizer.eos_ids, executable.vocab_size)
    policy = options.model.config.scheduler_config(cache_output=False)
    note = draft_note(policy.speculative, executable.capabilities)
    if note is not None:
        say(note)
    how: dict[str, Any] = {"grammars": grammars, "draft_model": draft_model}
    service = EngineService(executable, transport, policy=policy, **how)
    service.loop.warm_up()
    invariance = options.model.config.batch_invariant
    facts = served_facts(source, compiled, invariance=invariance)
    served = Served(
        ready=service.ready(facts),
        coder=source.tokenizer,
        name=source.name,
        fingerprint=fingerprint_of(facts),
        defaults=options.sampling,
    )
    preparer = Preparer(
        model=served,
        template=read_template(source.tokenizer, None),
        trials=BatchGrammarValidator(grammars),
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        created=created,
    )
    return BatchEngine(service, transport, preparer)
