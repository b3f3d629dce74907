"""Random prefill, decode and remove: every row equals the reference.

In the fast CPU mode, rows may differ with the batch by `FAST_ROW` at most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny import (
    compiled,
    leave_slot,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.errors import RequestError
from tilewright.runtime.engine import DuplicateRequestError, Engine, UnknownRequestError

VOCAB, CONTEXT = 61, 32
WITHIN = 1e-4
FAST_ROW = 1e-4
"""Measured: 0, with int8 activations too. A row's scale is its own; only the order of a float sum
could differ with the batch."""

MODEL = tiny_model(std=0.2)
PRECISION = precision_of("bfp8")


def build(target: str, batch: int, *, context: int = CONTEXT, compute: str = "exact") -> Executable:
    precision = precision_of("bfp8", "lofi") if compute == "fast" else PRECISION
    return compiled(
        MODEL, target, precision=precision, max_batch=batch, max_context=context, compute=compute
    )


@pytest.fixture(scope="module")
def oracle() -> Executable:
    """Compute whole histories in a single step."""
    return build("reference", 32)


def recomputed(oracle: Executable, histories: Sequence[Sequence[int]]) -> Tensor:
    """Return the last logits for each history: ``[len(histories), vocab]``."""
    handles = [take_slot(oracle, len(tokens)) for tokens in histories]
    work = [(handle, list(tokens), 0) for handle, tokens in zip(handles, histories, strict=True)]
    logits = step(oracle, work)
    for handle in handles:
        leave_slot(oracle, handle)
    return logits


class Operations:
    """Seeded random engine operations. ``histories`` has the expected tokens."""

    def __init__(self, engine: Engine, oracle: Executable, seed: int) -> None:
        self.engine = engine
        self.oracle = oracle
        self.batch = engine.executable.capabilities.max_num_seqs
        self.random = random.Random(seed)
        self.histories: dict[int, list[int]] = {}
        self.counts = dict.fromkeys(("prefill", "replaced", "decode", "remove", "refused"), 0)

    def run(self, count: int) -> None:
        for _ in range(count):
            chosen = self.random.choices(
                (self.prefill, self.decode, self.remove, self.refused), (3, 5, 1, 1)
            )[0]
            chosen()
            self.check_state()

    def prefill(self) -> None:
        live, size = list(self.histories), self.random.randint(1, self.batch)
        replaced = self.random.sample(live, min(len(live), self.random.randint(0, size) // 2))
        free = self.batch - len(live)
        fresh = [id_ for id_ in self.random.sample(range(10**6), size) if id_ not in live][:free]
        ids = self.random.sample(replaced + fresh, len(replaced) + len(fresh))
        ids = ids or live[:1]
        prompts = [self.tokens(self.random.randint(1, CONTEXT - 4)) for _ in ids]
        self.histories |= dict(zip(ids, prompts, strict=True))
        self.counts["prefill"] += 1
        self.counts["replaced"] += any(id_ in live for id_ in ids)
        self.compare(ids, self.engine.prefill(ids, [torch.tensor(prompt) for prompt in prompts]))

    def decode(self) -> None:
        able = [id_ for id_, tokens in self.histories.items() if len(tokens) < CONTEXT]
        if not able:
            return self.prefill()
        ids = self.random.sample(able, self.random.randint(1, len(able)))
        tokens = self.tokens(len(ids))
        for id_, token in zip(ids, tokens, strict=True):
            self.histories[id_] = [*self.histories[id_], token]
        self.counts["decode"] += 1
        self.compare(ids, self.engine.decode(ids, torch.tensor(tokens)))
        return None

    def remove(self) -> None:
        live = list(self.histories)
        gone = self.random.sample(live, self.random.randint(0, len(live)))
        unknown = [-1, 10**6 + 1]
        self.engine.remove([*gone, *unknown, *gone[:1]])
        self.counts["remove"] += 1
        for id_ in gone:
            del self.histories[id_]

    def refused(self) -> None:
        """Make a call with an error in its last entry."""
        ids = list(self.histories)
        bad_prompt = self.random.choice([[], [VOCAB], [-1], [0] * (CONTEXT + 1)])
        with pytest.raises(RequestError):
            self.engine.prefill([*ids, -5], [torch.tensor([1])] * len(ids) + [long(bad_prompt)])
        able = [id_ for id_ in ids if len(self.histories[id_]) < CONTEXT]
        with pytest.raises(UnknownRequestError):
            self.engine.decode([*able, -5], torch.tensor([1] * (len(able) + 1)))
        self.counts["refused"] += 1

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def compare(self, ids: Sequence[int], logits: Tensor) -> None:
        expected = recomputed(self.oracle, [self.histories[id_] for id_ in ids])
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=WITHIN, rtol=WITHIN)

    def check_state(self) -> None:
        executable = self.engine.executable
        assert set(self.engine.request_ids) == set(self.histories)
        positions = sum(map(len, self.histories.values()))
        assert executable.memory().state == executable.state_bytes(positions, len(self.histories))


def long(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


@pytest.mark.parametrize(
    ("target", "batch", "count", "chunk"),
    [
        *(("cpu", 1, 100, 512), ("cpu", 5, 130, 7), ("cpu", 32, 120, 3)),
        *(("reference", 1, 100, 512), ("reference", 5, 130, 7)),
        pytest.param("reference", 32, 120, 3, marks=pytest.mark.slow),
        pytest.param("cpu", 5, 2000, 7, marks=pytest.mark.slow),
        pytest.param("reference", 5, 2000, 7, marks=pytest.mark.slow),
    ],
)
def test_random_operations(
    oracle: Executable, target: str, batch: int, count: int, chunk: int
) -> None:
    executable = build(target, batch)
    engine = Engine(executable, step_tokens=chunk)
    operations = Operations(engine, oracle, seed=batch)
    operations.run(count)
    assert min(operations.counts.values()) > 5, operations.counts
    engine.remove(engine.request_ids)
    assert engine.request_ids == ()
    assert executable.memory().state == executable.state_bytes(0, 0)
    executable.close()


@pytest.fixture(scope="module")
def executable() -> Iterator[Executable]:
    made = build("cpu", 4)
    yield made
    made.close()


@pytest.fixture
def engine(executable: Executable) -> Iterator[Engine]:
    made = Engine(executable)
    yield made
    made.remove(made.request_ids)


@settings(max_examples=25)
@given(st.integers(1, 33), st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4))
def test_prompts_in_chunks_are_whole_prompts(
    executable: Executable, chunk: int, lengths: list[int]
) -> None:
    prompts = [torch.tensor(random_tokens(n, seed=n)) for n in lengths]
    ids = range(len(prompts))
    whole, chunked = Engine(executable), Engine(executable, step_tokens=chunk)
    expected = whole.prefill(ids, prompts)
    follow = whole.decode([0], torch.tensor([3])) if lengths[0] < CONTEXT else None
    whole.remove(ids)
    torch.testing.assert_close(chunked.prefill(ids, prompts), expected, atol=WITHIN, rtol=0)
    if follow is not None:
        again = chunked.decode([0], torch.tensor([3]))
        torch.testing.assert_close(again, follow, atol=WITHIN, rtol=0)
    chunked.remove(ids)


def test_the_context_can_be_filled_to_its_end(engine: Engine, oracle: Executable) -> None:
    tokens = random_tokens(CONTEXT)
    engine.prefill([0, 1], [torch.tensor(tokens[:-1]), torch.tensor(tokens)])
    logits = engine.decode([0], torch.tensor(tokens[-1:]))
    torch.testing.assert_close(logits, recomputed(oracle, [tokens]), atol=WITHIN, rtol=0)
    for request_id in (0, 1):
        with pytest.raises(RequestError, match=f"request {request_id} .*; allowed: 32 tokens"):
            engine.decode([request_id], torch.tensor([1]))


def test_decode_text_equals_single_steps(engine: Engine) -> None:
    prompt, text = torch.tensor(random_tokens(5)), torch.tensor(random_tokens(6, seed=1))
    engine.prefill([0, 1], [prompt, prompt])
    together = torch.cat([logits.clone() for logits in engine.decode_text(0, text)])
    alone = torch.cat([engine.decode([1], token).clone() for token in text.split(1)])
    assert torch.equal(together, alone) and engine.length(0) == 11
    engine.remove([0, 1])


# The following calls fail. `start` and `still_right` check that nothing changed.

TOKENS = {3: random_tokens(5, seed=3), 8: random_tokens(9, seed=8), 9: random_tokens(CONTEXT)}


@pytest.fixture
def started(engine: Engine) -> Engine:
    engine.prefill(list(TOKENS), [torch.tensor(tokens) for tokens in TOKENS.values()])
    return engine


def still_right(engine: Engine, oracle: Executable) -> None:
    assert engine.request_ids == (3, 8, 9)
    logits = engine.decode([8, 3], torch.tensor([1, 2]))
    expected = recomputed(oracle, [[*TOKENS[8], 1], [*TOKENS[3], 2]])
    torch.testing.assert_close(logits, expected, atol=WITHIN, rtol=0)
    logits = engine.prefill([4, 3], [torch.tensor([7]), torch.tensor([5, 6])])
    torch.testing.assert_close(logits, recomputed(oracle, [[7], [5, 6]]), atol=WITHIN, rtol=0)


@pytest.mark.parametrize(
    ("ids", "prompts", "message"),
    [
        ([3, 3], [[1], [2]], "request 3 is named twice in one call"),
        ([5, 6, 5], [[1], [2], [3]], "request 5 is named twice in one call"),
        ([3, 5], [[1], []], "request 5 has 0 tokens; allowed: 1 to 32"),
        ([3, 5], [[1], [0] * 33], "request 5 has 33 tokens; allowed: 1 to 32"),
        ([3, 5], [[1], [0, 61]], "token 61; allowed: 0 to 60"),
        ([3, 5], [[1], [-1, 0]], "token -1; allowed: 0 to 60"),
        ([5, 6], [[1], [2]], r"2 new requests; allowed: 1 more \(4 at a time\)"),
        ([3, 5], [[1]], "2 request ids for 1 inputs"),
        ([3], [[1], [2]], "1 request ids for 2 inputs"),
    ],
)
def test_a_prefill_that_is_refused_changes_nothing(
    started: Engine, oracle: Executable, ids: list[int], prompts: list[list[int]], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        started.prefill(ids, [long(prompt) for prompt in prompts])
    assert "\n" not in str(caught.value)
    still_right(started, oracle)


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([3, 77], [1, 1], "request 77 is not known; prefill it first"),
        ([3, 8, 3], [1, 1, 1], "request 3 is named twice in one call"),
        ([3, 8], [1, 61], "token 61; allowed: 0 to 60"),
        ([3, 8], [1, -1], "token -1; allowed: 0 to 60"),
        ([3, 9], [1, 1], "request 9 is at the end of its context; allowed: 32 tokens"),
        ([3, 8], [1], "2 request ids for 1 inputs"),
    ],
)
def test_a_decode_that_is_refused_changes_nothing(
    started: Engine, oracle: Executable, ids: list[int], tokens: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        started.decode(ids, torch.tensor(tokens))
    assert "\n" not in str(caught.value)
    still_right(started, oracle)


def test_errors_are_also_the_builtin_ones(started: Engine) -> None:
    with pytest.raises(KeyError) as unknown:
        started.decode([77], torch.tensor([1]))
    assert str(unknown.value) == "request 77 is not known; prefill it first"
    with pytest.raises(ValueError, match="twice") as duplicate:
        started.decode([3, 3], torch.tensor([1, 1]))
    assert isinstance(unknown.value, UnknownRequestError | RequestError)
    assert isinstance(duplicate.value, DuplicateRequestError)


def test_a_removed_request_is_unknown_again(started: Engine) -> None:
    started.remove([8, 8, 12345])
    assert started.request_ids == (3, 9)
    with pytest.raises(UnknownRequestError):
        started.decode([8], torch.tensor([1]))


def test_nothing_asked_is_nothing_done(started: Engine) -> None:
    assert started.prefill([], []).shape == (0, VOCAB)
    assert started.decode([], long([])).shape == (0, VOCAB)
    started.remove([])
    assert started.request_ids == (3, 8, 9)


def test_rows_of_the_fast_mode_are_what_they_are_alone() -> None:
    """Compare 32 requests in a call with single requests."""
    executable = build("cpu", 32, compute="fast")
    engine = Engine(executable)
    prompts = [random_tokens(1 + 3 * n % 17, seed=n) for n in range(32)]
    engine.prefill(range(32), [torch.tensor(prompt) for prompt in prompts])
    together = engine.decode(range(32), torch.arange(32))
    engine.remove(range(32))
    alone = torch.stack(
        [
            prefill(executable, [*prompt, token], [len(prompt)])[-1]
            for token, prompt in enumerate(prompts)
        ]
    )
    difference = float((together - alone).abs().max())
    assert 0.1 < alone.std() < 30
    assert difference <= FAST_ROW
    executable.close()


class Broken:
    """Fails in a step after partial computation."""

    def __init__(self, executable: Executable, fails_at: int) -> None:
        self.step, self.left = executable.step, fails_at

    def __call__(self, step: Step) -> StepOutput:
        self.left -= 1
        output = self.step(step)
        if not self.left:
            raise RuntimeError("out of memory")
        return output


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_step_that_fails_changes_nothing(
    started: Engine, oracle: Executable, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths stay unchanged, and a replaced prompt too."""
    executable = started.executable
    with monkeypatch.context() as patched:
        patched.setattr(executable, "step", Broken(executable, fails_at))
        with pytest.raises(RuntimeError, match="out of memory"):
            started.prefill([3, 8], [long([1, 2]), long([3])])
    assert (started.length(3), started.length(8)) == (5, 9)
    with monkeypatch.context() as patched:
        patched.setattr(executable, "step", Broken(executable, 1))
        with pytest.raises(RuntimeError, match="out of memory"):
            started.decode([3, 8], torch.tensor([1, 2]))
    still_right(started, oracle)
