"""Two ranks of the CUDA target, in threads, sample the tokens of a single device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.dealt_models import make
from tests.draft_layers import tiny_layer
from tests.masks import allowed_of
from tests.targets.cuda import emulated_all_reduce
from tests.targets.cuda.sharing import set_sharing
from tests.targets.cuda.thread_ranks import Meeting, ThreadExchange, together
from tests.tiny import precision_of, random_tokens
from tilewright.compiler.driver import (
    lower_draft_layer,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.collectives.gathered import GatheredExchange
from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.graphs.mixed_batch import MixedBatchRunner
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.target import CudaTarget
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    OpenSlot,
    PrefillChunk,
    Slot,
    Step,
)
from tilewright.compiler.targets.program.instructions import AllReduceOp, BufferView
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.errors import CompileError
from tilewright.models.config import DeltaShape

GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.5, top_k=7, seed=11)
BY_HOST = SamplingParams(frequency_penalty=1.0)
PROMPTS = (random_tokens(5, seed=1, vocab_size=131), random_tokens(9, seed=2, vocab_size=131))


TWO = ParallelConfig(2)
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SMALL_HYBRID = {**SMALL, "delta": DeltaShape(2, 4, 8, 12, 4)}
"""Heads for two ranks: the interpreter runs each head of each row."""


def rank_of(
    model: SimpleNamespace,
    parallel: ParallelConfig,
    rank: int,
    *,
    layer: SimpleNamespace | None = None,
    **how: Any,
) -> CudaExecutable:
    target = CudaTarget()
    how = {"max_batch": 2, "max_context": 64, "compute": "exact", **how}
    options, precision = CompileOptions(parallel=parallel, rank=rank, **how), precision_of("bf16")
    if layer is not None and rank == 0:
        found = lower_draft_layer(model, layer, precision, target="cuda", options=options)
        options = replace(options, draft_layer=found)
    parallel = target.settled(options)
    resolved = resolve_precision(model, precision)
    graph, _ = lower_model(model, resolved, target.stages(), silent, parallel=parallel, rank=rank)
    source = weight_source(model, None, parallel)
    executable = target.compile(graph, source, options, silent)
    assert isinstance(executable, CudaExecutable)
    return executable


def steps_of(choosing: Sequence[SamplingParams], *, masked: bool) -> list[Step]:
    slots = tuple(Slot(i) for i in range(len(choosing)))
    edits: list[Any] = [OpenSlot(slot, each) for slot, each in zip(slots, choosing, strict=True)]
    edits += [AssignPages(slot, 0, (int(slot),)) for slot in slots]
    chunks = tuple(
        PrefillChunk(slot, 0, tuple(prompt), chooses=True)
        for slot, prompt in zip(slots, PROMPTS, strict=False)
    )
    decode = Step(decode=slots)
    last = Step(decode=slots, masked=True) if masked else Step(decode=slots, want_logits=True)
    return [Step(prompts=chunks, edits=tuple(edits)), decode, decode, last, decode]


def run(executable: CudaExecutable, steps: Sequence[Step], *, leads: bool = True) -> list[Any]:
    found: list[Any] = []
    for step in steps:
        output = executable.step(step) if leads else executable.follow(step)
        if step.masked and leads:
            mask = np.zeros(131, dtype=bool)
            mask[20:90] = True
            assert output is not None
            executable.choose(output, allowed_of(dict.fromkeys(step.decode, mask)))
        elif step.masked:
            executable.follow_choice()
        if leads:
            assert output is not None
            chosen = [part.read() for part in output.parts]
            tokens = [token for each in chosen for token in each.tokens]
            found.append((tokens, [why for each in chosen for why in each.why]))
            if logits := [part.logits() for part in output.parts if part.logits is not None]:
                found.append(torch.cat(logits))
    return found


class Library:
    """Gathers for a rank in a thread."""

    count, has_ended = 2, False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self._meeting = rank, meeting

    def all_gather(self, parts: torch.Tensor) -> None:
        parts.copy_(torch.stack(self._meeting.gather(self.rank, parts[self.rank].clone())))


class Two:
    """A model on a single device and on two ranks.

    Args:
        how: Compile options.
        drafts: The single device and the leader have a draft layer.
    """

    def __init__(
        self,
        model_type: str,
        parallel: ParallelConfig = TWO,
        how: Mapping[str, Any] = MappingProxyType({}),
        *,
        drafts: bool = False,
        **changes: Any,
    ) -> None:
        sizes = SMALL_HYBRID if model_type == "qwen3_5_moe" else SMALL
        model, self.meeting = make(model_type, **{**sizes, **changes}), Meeting(2)
        if drafts:
            how = {**how, "layer": tiny_layer(model)}
        self.alone = rank_of(model, SINGLE_RANK, 0, **how)
        self.exchanges = [ThreadExchange(self.meeting, rank) for rank in range(2)]
        self.ranks = [rank_of(model, parallel, rank, **how) for rank in range(2)]
        for each, exchange in zip(self.ranks, self.exchanges, strict=True):
            each.unite(RankGroup(exchange, each.logit_columns))  # type: ignore[arg-type]

    def check(self, steps: list[Step], most: float = 1e-4) -> None:
        """Compare tokens, logits within ``most``, and the number of collectives per rank."""
        expected = run(self.alone, steps)
        found, _ = together(self.meeting, lambda at: run(self.ranks[at], steps, leads=not at))
        assert self.ranks[0].agreed() == self.ranks[1].agreed() != b"[]"
        for each in (self.alone, *self.ranks):
            each.reset()
        for ours, theirs in zip(found, expected, strict=True):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(ours, theirs, atol=most, rtol=most)
            else:
                assert ours == theirs
        counts = [each.steps for each in self.exchanges]
        assert counts[0] == counts[1] and len(counts[0]) >= 2 * len(steps) - 1


@pytest.fixture(scope="module")
def two() -> Two:
    return Two("llama", num_layers=1)


@pytest.mark.parametrize(
    ("choosing", "masked"),
    [((GREEDY, DRAWN), True), ((BY_HOST, DRAWN), True)],
    ids=["drawn", "by the host"],
)
def test_two_ranks_choose_as_one(
    two: Two, choosing: tuple[SamplingParams, ...], masked: bool
) -> None:
    two.check(steps_of(choosing, masked=masked))


def test_two_ranks_accept_the_same_drafts() -> None:
    """The next step starts before the accepted tokens are read."""
    two = Two("llama", how={"max_drafts": 3}, num_layers=1)
    first, decode, *_ = steps_of((GREEDY, DRAWN), masked=False)
    _, (tokens, _), (later, _) = run(two.alone, [first, decode, decode])
    two.alone.reset()
    a, b = decode.decode
    drafts = {a: (tokens[0], later[0], tokens[0] ^ 1), b: (tokens[1] ^ 1,)}
    found = run(two.alone, [first, replace(decode, drafts=drafts)])[1][0]
    two.alone.reset()
    assert found[:2] == [tokens[0], later[0]] and found[3:] == [tokens[1]]
    two.check([first, replace(decode, drafts=drafts), decode, replace(decode, want_logits=True)])


@pytest.mark.parametrize("linear_layers", [(False,), (True,)])
def test_the_leader_drafts_with_its_layer(linear_layers: tuple[bool, ...]) -> None:
    """Drafts after a prompt and after decode steps with and without drafts."""
    how = {"max_drafts": 3}
    two = Two("qwen3_5_moe", how=how, drafts=True, num_layers=1, linear_layers=linear_layers)
    first, decode, *_ = steps_of((GREEDY, DRAWN), masked=False)
    proposes = Step(proposes=dict.fromkeys(decode.decode, 3))

    def answers(executable: CudaExecutable, *, leads: bool) -> list[Any]:
        found = run(executable, [first], leads=leads)
        for given in ((3, 4), (), (5,)):
            if leads:
                found += run(executable, [proposes])
            drafts = dict.fromkeys(decode.decode, given) if given else {}
            found += run(executable, [replace(decode, drafts=drafts)], leads=leads)
        return found

    expected = answers(two.alone, leads=True)
    found, _ = together(two.meeting, lambda at: answers(two.ranks[at], leads=not at))
    assert found == expected and len(expected[1][0]) == 6
    assert two.ranks[0].agreed() == two.ranks[1].agreed() != b"[]"
    assert two.ranks[1].capabilities.max_proposals == 0 < two.ranks[0].capabilities.max_proposals


@pytest.mark.parametrize(
    ("choosing", "masked"), [((GREEDY, DRAWN), True), ((BY_HOST, GREEDY), False)]
)
def test_what_a_library_gathers_has_the_bits_of_peers(
    two: Two, monkeypatch: pytest.MonkeyPatch, choosing: tuple[SamplingParams, ...], masked: bool
) -> None:
    """Greedy, sampled and host-sampled rows have equal logits and tokens."""
    monkeypatch.setattr(nvrtc, "launch", emulated_all_reduce.launch)
    steps = steps_of(choosing, masked=masked)

    def answers() -> list[Any]:
        found = together(two.meeting, lambda at: run(two.ranks[at], steps, leads=not at))
        for each in two.ranks:
            each.reset()
        return found[0]

    expected, groups = answers(), [each._group for each in two.ranks]
    for rank, each in enumerate(two.ranks):
        library = Library(two.meeting, rank)
        exchange = GatheredExchange(library, part_bytes=1 << 14, device=each.device)
        each.unite(RankGroup(exchange, each.logit_columns))
    for one, other in zip(answers(), expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for each, group in zip(two.ranks, groups, strict=True):
        assert group is not None
        each.unite(group)


def test_sums_that_no_add_follows() -> None:
    """Gemma normalizes the outputs of attention and MLP before the add."""
    Two("gemma3_text").check(steps_of((GREEDY, GREEDY), masked=False)[:2])


def test_experts_and_linear_attention() -> None:
    """Expert widths are split. Key heads stay with their value heads."""
    two = Two("qwen3_5_moe", ParallelConfig(2, expert=1))
    two.check(steps_of((GREEDY, GREEDY), masked=False)[:2])


def test_whole_experts() -> None:
    """Each rank has three whole experts.

    Steps have two rows, and one row, whose pairs are tiles.
    """
    two = Two("qwen3_moe", ParallelConfig(2, expert=2), num_layers=1)
    two.check(steps_of((GREEDY, GREEDY), masked=False)[:2])
    two.check(steps_of((GREEDY,), masked=False)[:2])


def riding_steps() -> list[Step]:
    """Two sequences decode, one with random sampling, while two prompts run in chunks, at last with
    masks. Then all four decode.
    """
    a, b, c, d = slots = tuple(Slot(n) for n in range(4))
    rows = (GREEDY, DRAWN, DRAWN, GREEDY)
    edits: list[Any] = [OpenSlot(slot, each) for slot, each in zip(slots, rows, strict=True)]
    edits += [AssignPages(slot, 0, (int(slot),)) for slot in slots]
    first, last = (tuple(each) for each in PROMPTS)
    begun = PrefillChunk(a, 0, first, chooses=True), PrefillChunk(b, 0, last, chooses=True)
    halves = (PrefillChunk(c, 0, last[:4]), PrefillChunk(d, 0, first[:2]))
    end_c = (PrefillChunk(c, 4, last[4:], chooses=True),)
    end_d = (PrefillChunk(d, 2, first[2:], chooses=True),)
    return [
        Step(prompts=begun, edits=tuple(edits)),
        Step(decode=(a, b), prompts=halves, want_logits=True),
        Step(decode=(a, b), prompts=end_c, want_logits=True),
        Step(decode=(a, b), prompts=end_d, masked=True),
        Step(decode=slots, want_logits=True),
    ]


@pytest.mark.parametrize(
    ("model_type", "changes"), [("llama", {}), ("qwen3_5_moe", {"linear_layers": (True,)})]
)
def test_rows_ride_along_on_two_ranks_as_on_one(
    model_type: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked steps are excluded: ranks wait outside of captured graphs."""
    set_sharing(monkeypatch)
    rode, run_joined = list[int](), MixedBatchRunner.run

    def spied(
        self: MixedBatchRunner, chunks: Any, step: Step, riding: tuple[Slot, ...] = ()
    ) -> Any:
        rode.append(len(riding))
        return run_joined(self, chunks, step, riding)

    monkeypatch.setattr(MixedBatchRunner, "run", spied)
    how = {"max_batch": 4, "compute": "fast"}
    Two(model_type, ParallelConfig(2), how, num_layers=1, **changes).check(riding_steps(), 2e-2)
    assert rode[:4] == [0, 2, 2, 2] and sorted(rode[4:]) == sorted([0, 2, 2] * 2)


@pytest.mark.parametrize(
    ("compute", "is_strict", "named", "prompt"),
    [
        ("fast", False, None, "bf16"),
        ("fast", False, "fp32", "fp32"),
        ("fast", True, None, "fp32"),
        ("exact", False, None, "fp32"),
    ],
)
def test_prompts_send_bf16_where_nothing_speaks_against_it(
    compute: str, is_strict: bool, named: str | None, prompt: str
) -> None:
    parallel = ParallelConfig(2, wire=named)
    rank = rank_of(make("llama"), parallel, 0, compute=compute, is_strict=is_strict)
    assert any("sums of prompts" in note for note in rank.notes) == (prompt == "bf16")
    sent: list[str] = []
    exchange = SimpleNamespace(all_reduce=lambda out, x, wire: sent.append(wire))
    rank._steps.group = SimpleNamespace(exchange=exchange)  # type: ignore[assignment]
    buffers: Any = SimpleNamespace(view=lambda place: place)
    each = AllReduceOp(BufferView(0, 8), BufferView(1, 8), "fp32")
    for keeps_wire in (True, False):
        rank._steps._reduce(each, buffers, keeps_wire=keeps_wire)
    assert sent == ["fp32", prompt]


def test_what_no_kernel_sends_is_refused() -> None:
    with pytest.raises(CompileError, match="wire q80 on target cuda; allowed: fp32, bf16"):
        CudaTarget().settled(CompileOptions(parallel=ParallelConfig(2, wire="q80")))
    for count in (1, 16):
        assert CudaTarget().settled(CompileOptions(parallel=ParallelConfig(count))).wire == "fp32"
