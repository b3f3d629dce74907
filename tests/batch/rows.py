"""Records and a data set for tests of batches, and a batch engine on a null or tiny executable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tilewright.batch.engine import BatchEngine, FinishedRequest
from tilewright.batch.preparing import BatchGrammarValidator, Preparer
from tilewright.batch.records import Item, Record, refused
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.null import NullExecutable
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.runtime.grammar.matchers import grammars_of
from tilewright.runtime.scheduling.request_state import SchedulerConfig
from tilewright.runtime.service import EngineService, QueueTransport
from tilewright.serve.prompt.template import read_template
from tilewright.serve.tasks import Served
from tilewright.serve.web.errors import ApiError

VOCABULARY = 256


def record(row: int, text: str = "a", *, status: int = 200) -> Record:
    """What became of a row of one choice, or an error."""
    if status != 200:
        return refused(row, ApiError(status, "invalid_value", text))
    said = {"choices": [{"text": text, "finish_reason": "stop"}]}
    raw = msgspec.Raw(msgspec.json.encode(said))
    return Record(row=row, prompt_tokens=2, completion_tokens=len(text), body=raw)


def null_executable(slots: int = 4, context: int = 64) -> NullExecutable:
    """One that chooses token 0, always."""
    options = CompileOptions(max_batch=slots, max_context=context)
    return NullExecutable(VOCABULARY, options, NumericContract((), ()))


def null_engine(
    folder: Path,
    executable: NullExecutable | None = None,
    *,
    ignore_eos: bool = True,
    chat_template: str | None = None,
    policy: SchedulerConfig | None = None,
) -> BatchEngine:
    """A batch engine on an executable that needs no weights; its tokens are bytes."""
    plain = byte_tokenizer(VOCABULARY, "null")
    tokenizer = Tokenizer(replace(plain._vocabulary, chat_template=chat_template))
    tokenizer.save(folder / "tokenizer")
    transport = QueueTransport()
    grammars = grammars_of(folder / "tokenizer", tokenizer.eos_ids, VOCABULARY)
    how: dict[str, Any] = {"policy": policy, "grammars": grammars}
    service = EngineService(executable or null_executable(), transport, **how)
    served = Served(
        ready=service.ready({}), coder=tokenizer, name="null", fingerprint="fp", defaults={}
    )
    preparer = Preparer(
        model=served,
        template=read_template(tokenizer, None),
        trials=BatchGrammarValidator(grammars),
        ignore_eos=ignore_eos,
    )
    return BatchEngine(service, transport, preparer)


def run(engine: BatchEngine, items: Sequence[Item | Record]) -> Iterator[FinishedRequest]:
    """All that has ended, in the order in which it did."""
    for ended in engine.run(iter(items)):
        yield from ended


def completion(row: int, **body: object) -> Item:
    """A row that is continued."""
    return Item(row, False, msgspec.json.encode({"prompt": "abc", **body}))
