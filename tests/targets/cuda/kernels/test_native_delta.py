"""delta_step.cu against float64 and the Triton kernels: bits, state and errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.table import FAST, HOPPER, INTERPRETER
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_step as native_delta
from tilewright.compiler.targets.cuda.kernels.delta_rule.causal_conv1d import causal_conv1d_step
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_rows import delta_rows
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_step import (
    columns_of_a_block,
    delta_step,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.rows_triton import (
    DraftInputs,
    causal_conv1d_rows,
    linear_attention_rows,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import (
    DeltaInputs,
    delta_rule_step,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.table import (
    STEP,
    TRITON,
    DeltaSite,
    bind_step,
    why_no_step,
)
from tilewright.compiler.targets.cuda.state.token_batch import SlotRows

NAN = float("nan")
EPS = 1e-6
SIZES = [
    (1, 1, 64, 4),
    (2, 4, 64, 3),
    (1, 3, 64, 2),
    (1, 4, 64, 4),
    (1, 7, 64, 4),
    (2, 2, 128, 4),
    (2, 4, 128, 4),
    (1, 2, 128, 2),
    (1, 3, 128, 3),
    (2, 8, 128, 4),
]
"""Key heads, value heads, size of both, width of the convolution."""

POSITIONS = [5, 0, -1, 70]


def between(x: Tensor) -> Tensor:
    """Return the values within a wider tensor."""
    return torch.nn.functional.pad(x, (1, 4), value=NAN)[:, 1:-4]


@dataclass
class Step:
    """Operands within wider tensors. Slots differ from rows, and padding has a used slot."""

    inputs: DeltaInputs
    z: Tensor
    norm: Tensor
    weight: Tensor
    window: Tensor
    state: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def make(
        cls, positions: list[int], size: tuple[int, int, int, int], device: torch.device
    ) -> Self:
        key_heads, heads, dim, width = size
        num_rows, inner = len(positions), heads * dim
        num_channels = 2 * key_heads * dim + inner
        x, z = (torch.randn(num_rows, each, device=device) for each in (num_channels, inner))
        a, b = torch.randn(2, num_rows, heads, device=device) * 3
        a_log, dt_bias = torch.randn(2, heads, device=device)
        slots = torch.arange(num_rows, 0, -1, device=device)
        at = torch.tensor(positions, device=device)
        slots[at < 0] = slots[0].clone()
        return cls(
            DeltaInputs(between(x), between(a), between(b), a_log, dt_bias, key_heads, dim),
            between(z),
            torch.rand(dim, device=device) + 0.5,
            torch.randn(num_channels, width, device=device),
            torch.randn(num_rows + 2, num_channels, width - 1, device=device),
            torch.randn(num_rows + 2, heads, dim, dim, device=device) * 0.3,
            at,
            slots,
        )

    def some(self, rows: list[int]) -> Step:
        """Return some rows with a copy of the state."""
        given = self.inputs
        x, a, b, z = (between(each[rows]) for each in (given.qkv, given.a, given.b, self.z))
        inputs = replace(given, qkv=x, a=a, b=b)
        kept = self.window.clone(), self.state.clone()
        where = self.positions[rows], self.slots[rows]
        return Step(inputs, z, self.norm, self.weight, *kept, *where)

    def run(self, *, early: bool = False, streams: bool | None = None) -> Tensor:
        """Run delta_step.cu: bf16 ``[B, H V]``. The output starts as NaN with margins."""
        shape = (len(self.z), self.z.shape[1] + 12)
        out = torch.full(shape, NAN, dtype=torch.bfloat16, device=self.z.device)
        if out.is_cuda:
            torch.cuda.synchronize()  # for `early`
        self.launch(out[:, :-12], early=early, streams=streams)
        assert bool(out[:, -12:].isnan().all())
        return out[:, :-12]

    def launch(self, out: Tensor, *, early: bool, streams: bool | None) -> None:
        kept: dict[str, Any] = {"weight": self.weight, "window": self.window, "state": self.state}
        where: dict[str, Any] = {"positions": self.positions, "slots": self.slots}
        how: dict[str, Any] = {"early": early, "streams": streams}
        delta_step(out, self.inputs, self.z, (self.norm, EPS), **kept, **where, **how)

    def run_in_triton(self) -> Tensor:
        out = torch.full_like(self.z, NAN, dtype=torch.bfloat16)
        convolved = torch.empty_like(self.inputs.qkv)
        where: dict[str, Any] = {"positions": self.positions, "slots": self.slots}
        causal_conv1d_step(convolved, self.inputs.qkv, self.weight, window=self.window, **where)
        inputs = replace(self.inputs, qkv=convolved)
        delta_rule_step(out, inputs, self.z, (self.norm, EPS), state=self.state, **where)
        return out

    def expected(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row's result, window and state in float64."""
        given, slot = self.inputs, int(self.slots[row])
        key_heads, dim, heads = given.num_key_heads, given.key_dim, given.num_heads
        goes_on = float(self.positions[row] > 0)
        before, state = (each[slot].double() * goes_on for each in (self.window, self.state))
        seen = torch.cat((before, given.qkv[row].double()[:, None]), 1)
        convolved = torch.nn.functional.silu((seen * self.weight.double()).sum(1))
        q, k, v = convolved.split([key_heads * dim] * 2 + [heads * dim])
        q, k = (each.view(key_heads, dim) for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q, k = (each.repeat_interleave(heads // key_heads, 0) for each in (q * dim**-0.5, k))
        rate = torch.nn.functional.softplus(given.a[row].double() + given.dt_bias.double())
        state *= (-given.a_log.double().exp() * rate).exp()[:, None, None]
        wrong = v.view(heads, dim) - torch.einsum("hkv,hk->hv", state, k)
        wrong *= given.b[row].double().sigmoid()[:, None]
        state += k[:, :, None] * wrong[:, None, :]
        o = torch.einsum("hkv,hk->hv", state, q)
        y = o / (o.square().mean(1, keepdim=True) + EPS).sqrt() * self.norm.double()
        return y.flatten() * torch.nn.functional.silu(self.z[row].double()), seen[:, 1:], state


def all_rows(step: Step) -> list[int]:
    return list(range(len(step.positions)))


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_against_float64(
    size: tuple[int, int, int, int], early: bool, device: torch.device
) -> None:
    before = Step.make(POSITIONS, size, device)
    step = before.some(all_rows(before))
    out = step.run(early=early)
    touched = set()
    for row, position in enumerate(POSITIONS):
        if position < 0:
            assert not out[row].any()
            continue
        want, window, state = before.expected(row)
        slot = int(before.slots[row])
        touched.add(slot)
        torch.testing.assert_close(out[row].double(), want, rtol=2.0**-8, atol=1e-5)
        torch.testing.assert_close(step.state[slot].double(), state, rtol=1e-5, atol=1e-6)
        assert torch.equal(step.window[slot].double(), window)
    for slot in set(range(len(step.state))) - touched:
        assert torch.equal(step.state[slot], before.state[slot])
        assert torch.equal(step.window[slot], before.window[slot])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [SIZES[4], SIZES[6]])
def test_a_row_has_the_same_bits_whether_caches_keep_its_state(
    size: tuple[int, int, int, int], device: torch.device
) -> None:
    before = Step.make(POSITIONS, size, device)
    kept, streamed = (before.some(all_rows(before)) for _ in range(2))
    assert torch.equal(kept.run(streams=False), streamed.run(streams=True))
    assert torch.equal(kept.state, streamed.state) and torch.equal(kept.window, streamed.window)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [SIZES[1], SIZES[6]])
def test_is_what_the_triton_kernels_do(
    size: tuple[int, int, int, int], device: torch.device
) -> None:
    """Several steps, each from its own state."""
    made = Step.make([0, 3, 9, -1, 1], size, device)
    native, triton = (made.some(all_rows(made)) for _ in range(2))
    for _ in range(4):
        got, want = native.run(), triton.run_in_triton()
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-4)
        torch.testing.assert_close(native.state, triton.state, rtol=1e-4, atol=1e-5)
        assert torch.equal(native.window, triton.window)
        for each in (native, triton):
            each.positions += (each.positions >= 0).long()


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "size"), [(64, SIZES[6]), (9, SIZES[8]), (7, SIZES[4])])
def test_a_row_does_not_depend_on_its_batch(
    num_rows: int, size: tuple[int, int, int, int], device: torch.device
) -> None:
    """Also for any run and any position."""
    positions = [(row * 7) % 5 if row % 11 != 10 else -1 for row in range(num_rows)]
    made = Step.make(positions, size, device)
    together = made.some(all_rows(made))
    out = together.run()
    for _ in range(10):
        again = made.some(all_rows(made))
        assert torch.equal(again.run(early=True), out)
        assert torch.equal(again.state, together.state)
        assert torch.equal(again.window, together.window)
    backwards = made.some(all_rows(made)[::-1])
    assert torch.equal(backwards.run().flip(0), out)
    assert torch.equal(backwards.state, together.state)
    for row in {0, 1, num_rows // 2, num_rows - 1}:
        alone = made.some([row])
        slot = int(alone.slots[0])
        assert torch.equal(alone.run()[0], out[row])
        if positions[row] >= 0:
            assert torch.equal(alone.state[slot], together.state[slot])
            assert torch.equal(alone.window[slot], together.window[slot])


@pytest.mark.gpu
def test_extreme_gates_and_values(device: torch.device) -> None:
    """Immediate and no decay, zeros, and the limits of silu and sigmoid."""
    made = Step.make([3, 4, 5], (1, 2, 128, 4), device)
    made.inputs.a[0], made.inputs.b[0] = 60.0, -100.0
    made.inputs.a[1], made.inputs.b[1] = -60.0, 100.0
    made.z[1] *= 100.0
    made.inputs.qkv[2] = made.window[int(made.slots[2])] = 0.0
    step = made.some(all_rows(made))
    out = step.run()
    for row in range(3):
        want, _, state = made.expected(row)
        slot = int(made.slots[row])
        torch.testing.assert_close(out[row].double(), want, rtol=2.0**-8, atol=1e-5)
        torch.testing.assert_close(step.state[slot].double(), state, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_chained_in_a_graph(device: torch.device) -> None:
    """Layers in turn with separate states, replayed, equal single runs."""
    layers = [Step.make([5, 0, -1, 9], (16, 32, 128, 4), device) for _ in range(6)]
    wanted = [each.some(all_rows(each)) for each in layers]
    for each in layers:
        each.inputs.qkv[2] = NAN  # padding
    outs = torch.full((6, 4, 32 * 128), NAN, dtype=torch.bfloat16, device=device)
    kept = [(each.window.clone(), each.state.clone()) for each in layers]

    def steps() -> None:
        for layer, out in zip(layers, outs, strict=True):
            layer.launch(out, early=True, streams=None)

    torch.cuda.synchronize()
    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for layer, (window, state) in zip(layers, kept, strict=True):
        layer.window.copy_(window)
        layer.state.copy_(state)
    for _ in range(5):
        outs.fill_(NAN)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for layer, want, out in zip(layers, wanted, outs, strict=True):
            assert torch.equal(want.run(), out)
            assert torch.equal(want.state, layer.state)
            assert torch.equal(want.window, layer.window)


def test_a_cluster_has_all_value_heads_of_a_key_head() -> None:
    """A cluster has at most eight blocks. The batch does not change the split of a state."""
    wanted = {(16, 16, 128): 32, (32, 16, 128): 32, (48, 16, 128): 64, (64, 16, 128): 64}
    assert {given: columns_of_a_block(*given) for given in wanted} == wanted
    assert columns_of_a_block(5, 1, 128) == 0
    assert [columns_of_a_block(heads, 1, 64) for heads in (1, 4, 5, 8, 9)] == [32, 32, 64, 64, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_dim": 64}, "keys of 64 and values of 128 channels"),
        ({"key_dim": 96, "value_dim": 96}, "keys of 96 and values of 96 channels"),
        ({"num_heads": 5, "num_key_heads": 1}, "5 heads over 1 of keys"),
        ({"width": 5}, "a convolution of width 5"),
        ({"width": 1}, "a convolution of width 1"),
        ({}, "no GPU"),
    ],
)
def test_what_it_does_not_take_is_said(changes: dict[str, Any], words: str) -> None:
    site = replace(DeltaSite(FAST, INTERPRETER, 32, 16, 128, 128, 4), **changes)
    assert why_no_step(site) == words
    on_hopper = bind_step(replace(site, gpu=HOPPER))
    assert on_hopper == (STEP if words == "no GPU" else TRITON)


def test_names_of_kernels() -> None:
    """The source has all kernels with their thread counts."""
    text = native_delta.SOURCE.path.read_text()
    for name in native_delta.SOURCE.names:
        dim, columns = name.removeprefix("delta_step_").split("_")
        assert f"DELTA_STEP({dim}, {columns})" in text
    assert all(f'"{name}"' not in text for name in native_delta.SOURCE.headers[:1])
    assert len(native_delta.SOURCE.names) == 4


def run_rows(step: Step, rows: SlotRows, drafts: DraftInputs, *, is_native: bool) -> Tensor:
    """Run several rows per slot."""
    norm, where = (step.norm, EPS), {"positions": step.positions, "slots": step.slots}
    operands: dict[str, Any] = {"weight": step.weight, "window": step.window, "state": step.state}
    operands |= {"rows": rows, "drafts": drafts, **where}
    out = torch.full_like(step.z, NAN, dtype=torch.bfloat16)
    if is_native:
        delta_rows(out, step.inputs, step.z, norm, **operands)
    else:
        inputs = replace(step.inputs, qkv=torch.full_like(step.inputs.qkv, NAN))
        linear_attention_rows(out, inputs, step.inputs.qkv, step.z, norm, **operands)
    return out


@pytest.mark.parametrize("size", [SIZES[1], SIZES[4], SIZES[6], SIZES[9]])
@pytest.mark.parametrize(
    "is_native", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["triton", "cuda"]
)
def test_rows_after_accepted_drafts_equal_single_steps(
    size: tuple[int, int, int, int], is_native: bool, device: torch.device
) -> None:
    """Two slots and padding. Slot 1 begins at position 0. A replay ends the drafts."""
    if not is_native:
        size = (*size[:2], 16, size[-1])
    num_tokens, accepted = (12, 9), ((0, 0), (2, 1), (0, 2), (3, 0))
    tokens = [Step.make([*range(start, start + 12)], size, device) for start in (7, 0)]
    plain = tokens[0].some([0])
    outputs: list[list[Tensor]] = [[], []]
    states: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for slot, steps in enumerate(tokens):
        for token in range(num_tokens[slot]):
            step = replace(steps.some([token]), window=plain.window, state=plain.state)
            step = replace(step, weight=plain.weight, norm=plain.norm)
            step.inputs = replace(step.inputs, a_log=plain.inputs.a_log)
            step.inputs = replace(step.inputs, dt_bias=plain.inputs.dt_bias)
            step.slots[:] = slot
            outputs[slot].append(step.run() if is_native else step.run_in_triton())
            states[slot].append((step.window[slot].clone(), step.state[slot].clone()))
    first = tokens[0].some([0])
    channels, heads = first.inputs.qkv.shape[1], first.inputs.num_heads
    drafts = DraftInputs(
        torch.full((2, 3, channels), NAN, device=device),
        torch.full((2, 3, 2, heads), NAN, device=device),
    )
    starts = [0, 0]
    for counts, before in zip(((3, 2), (1, 3), (4, 2), (0, 0)), accepted, strict=True):
        starts = [start + n for start, n in zip(starts, before, strict=True)]
        at = [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
        of_slot = [slot for slot, count in enumerate(counts) for _ in range(count)] or [0, 1]
        at = at or starts
        single = [tokens[slot].some([token]) for slot, token in zip(of_slot, at, strict=True)]
        rows = SlotRows(*torch.zeros(2, len(at) + 1, dtype=torch.int64, device=device))
        leaders = [of_slot.index(slot) for slot in (0, 1)]
        rows.counts[leaders], rows.counts[-1] = torch.tensor(counts, device=device), 1
        rows.accepted[leaders] = torch.tensor(before, device=device)
        padded = [*single, single[0]]
        step = replace(
            first,
            inputs=replace(
                first.inputs,
                **{
                    name: between(torch.cat([getattr(other.inputs, name) for other in padded]))
                    for name in ("qkv", "a", "b")
                },
            ),
            z=between(torch.cat([other.z for other in padded])),
            positions=torch.cat([other.positions for other in padded]),
            slots=torch.tensor([*of_slot, 0], device=device),
        )
        step.positions[-1] = -1
        out = run_rows(step, rows, drafts, is_native=is_native)
        for index, (slot, token) in enumerate(zip(of_slot, at, strict=True)):
            assert not counts[slot] or torch.equal(out[index], outputs[slot][token][0])
        assert not out[-1].any()
        starts = [start + min(count, 1) for start, count in zip(starts, counts, strict=True)]
        for slot, start in enumerate(starts):
            window, state = states[slot][start - 1]
            assert torch.equal(first.window[slot], window)
            assert torch.equal(first.state[slot], state)


def test_convolution_rows_without_silu_equal_single_steps() -> None:
    x, weight, window = torch.randn(4, 20), torch.randn(20, 3), torch.randn(2, 20, 2)
    single, expected = window.clone(), torch.empty_like(x)
    slots, draft_x = torch.tensor([1, 1]), torch.full((2, 1, 20), NAN)
    states = []
    for token in range(4):
        at = slice(token, token + 1)
        where = {"positions": torch.tensor([5 + token]), "slots": slots[:1]}
        causal_conv1d_step(expected[at], x[at], weight, window=single, silu=False, **where)
        states.append(single.clone())
    for first, accepted in ((0, 0), (2, 1)):
        out, replayed = torch.full((2, 20), NAN), torch.empty(2, 1, 20)
        rows = SlotRows(torch.tensor([2, 0]), torch.tensor([accepted, 0]))
        state: dict[str, Any] = {"window": window, "draft_x": draft_x, "rows": rows}
        where = {"positions": torch.tensor([5, 6]) + first, "slots": slots}
        batch = x[first : first + 2]
        causal_conv1d_rows(out, replayed, batch, weight, silu=False, **state, **where)
        assert torch.equal(out, expected[first : first + 2])
        assert torch.equal(window, states[first])
