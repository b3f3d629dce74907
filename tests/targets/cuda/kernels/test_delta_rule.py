"""The gated delta rule with its norm against the op: steps, prompts in chunks, odd sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.grids import only
from tilewright.compiler import ops
from tilewright.compiler.ops.delta_rule import gates, recurrent_delta_rule, split_heads
from tilewright.compiler.targets.cuda.kernels.delta_rule import prompt_triton as prompts
from tilewright.compiler.targets.cuda.kernels.delta_rule.prompt_triton import delta_rule_prompt
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import (
    DeltaInputs,
    delta_rule_step,
)

NAN = float("nan")
SIZES = [(1, 3, 8, 24), (2, 4, 16, 16), (1, 1, 48, 40)]
"""Key heads, value heads, sizes of a key and of a value."""
LARGE = (1, 2, 128, 128)


def spans_of(span: int) -> list[object]:
    """Return cases of a short and a long span. The interpreter multiplies alike for both
    precisions.
    """
    cases = itertools.product((span, 2048), (True, False), (SIZES[0], LARGE))
    return only([(span, True, SIZES[0]), (2048, False, LARGE)], cases)


def make(num_tokens: int, size: tuple[int, int, int, int], device: torch.device) -> DeltaInputs:
    """Return inputs within wider tensors."""
    key_heads, heads, key_dim, value_dim = size
    width = 2 * key_heads * key_dim + heads * value_dim
    qkv = torch.randn(num_tokens, width + 5, device=device)[:, :width]
    ab = torch.randn(num_tokens, 2 * heads, device=device)
    a_log, dt_bias = torch.randn(2, heads, device=device)
    return DeltaInputs(qkv, ab[:, :heads], ab[:, heads:], a_log, dt_bias, key_heads, key_dim)


def some(inputs: DeltaInputs, rows: slice) -> tuple[object, ...]:
    """Return the op's arguments for some tokens."""
    parts = (each[rows].clone() for each in (inputs.qkv, inputs.a, inputs.b))
    return (*parts, inputs.a_log, inputs.dt_bias, inputs.num_key_heads, inputs.key_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_some_sequences(
    size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """A sequence continues, another begins, and a padding row has a used slot."""
    _, heads, key_dim, value_dim = size
    inputs, width = make(3, size, device), heads * value_dim
    z = torch.randn(3, width + 1, device=device)[:, :width]
    weight = torch.rand(value_dim, device=device)
    state = torch.randn(3, heads, key_dim, value_dim, device=device)
    expected = state.clone()
    where = (torch.tensor(each, device=device) for each in ([5, 0], [0, 1, 2], [2, 1]))
    given = (*some(inputs, slice(2)), expected, *where)
    want = ops.delta_rule_norm_step.reference(*given, z[:2], weight, 1e-6)
    out = torch.full((3, width + 3), NAN, dtype=dtype, device=device)
    positions, slots = torch.tensor([[5, 0, -1], [2, 1, 0]], device=device)
    delta_rule_step(
        out[:, :width], inputs, z, (weight, 1e-6), state=state, positions=positions, slots=slots
    )
    epsilon = 1e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(out[:2, :width].float(), want, rtol=epsilon, atol=1e-5)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[0], expected[0]) and not out[2, :width].any()
    assert bool(out[:, width:].isnan().all())


Norm = tuple[torch.Tensor, torch.Tensor, float]
"""What gates, the norm's weight, its epsilon."""


def run_prompt(
    inputs: DeltaInputs,
    norm: Norm,
    state: torch.Tensor,
    first: int,
    padding: int = 0,
    *,
    exact: bool = True,
    marks: Mapping[int, int] | None = None,
) -> torch.Tensor:
    """Run a prompt in slot 1 with NaN tokens at negative positions after it.

    ``marks``: slots for snapshots.
    """
    count, (z, weight, eps) = len(inputs.qkv), norm
    padded = partial(torch.nn.functional.pad, pad=(0, 0, 0, padding), value=NAN)
    qkv, a, b = (padded(each) for each in (inputs.qkv, inputs.a, inputs.b))
    width = z.shape[1]
    out = torch.full((count + padding, width + 3), NAN, device=state.device)
    positions = torch.arange(first, first + count + padding, device=state.device)
    positions[count:] = -1
    slots = torch.ones_like(positions)
    own = replace(inputs, qkv=qkv, a=a, b=b)
    keeps = None if marks is None else torch.full_like(positions, -1)
    for at, slot in (marks or {}).items():
        assert keeps is not None
        keeps[at] = slot
    run = partial(delta_rule_prompt, state=state, positions=positions, slots=slots, keeps=keeps)
    run(out[:, :width], own, padded(z), (weight, eps), exact=exact)
    assert not out[count:, :width].any() and bool(out[:, width:].isnan().all())
    return out[:count, :width]


def one_by_one(
    inputs: DeltaInputs, norm: Norm, state: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the op's result token by token, and the final state."""
    z, weight, eps = norm
    start = state[1] if first else torch.zeros_like(state[1])
    heads = split_heads(inputs.qkv, inputs.num_key_heads, inputs.key_dim, inputs.num_heads)
    decays = gates(inputs.a, inputs.b, inputs.a_log, inputs.dt_bias)
    q, k, v, decay, beta = (each.to(state.dtype) for each in (*heads, *decays))
    o_THV, after = recurrent_delta_rule(q, k, v, decay, beta, start)
    normed = ops.rms_norm.reference(o_THV, weight, eps).flatten(1)
    return torch.nn.functional.silu(z) * normed, after


def norm_of(inputs: DeltaInputs) -> Norm:
    """Return the norm with a large epsilon: small results do not amplify errors."""
    width, device = inputs.num_heads * inputs.value_dim, inputs.qkv.device
    z = torch.randn(len(inputs.qkv), width + 1, device=device)[:, :width]
    return z, torch.rand(inputs.value_dim, device=device), 1e-2


@pytest.mark.parametrize("span", [64, 2048])
@pytest.mark.parametrize(
    ("case", "first"),
    [((150, SIZES[0], 3), 7), ((64, SIZES[1], 0), 0), ((2, SIZES[2], 70), 7)],
)
def test_a_prompt_is_its_tokens_one_by_one(
    case: tuple[int, tuple[int, int, int, int], int],
    first: int,
    span: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a single span and in several, also with a span of padding."""
    monkeypatch.setattr(prompts, "SPAN", span)
    count, size, padding = case
    inputs = make(count, size, device)
    _, heads, key_dim, value_dim = size
    state, norm = torch.randn(2, heads, key_dim, value_dim, device=device), norm_of(inputs)
    before = state.clone()
    want, after = one_by_one(inputs, norm, state, first)
    got = run_prompt(inputs, norm, state, first, padding)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    torch.testing.assert_close(state[1], after, rtol=0, atol=5e-5)
    assert torch.equal(state[0], before[0])


@pytest.mark.parametrize(("span", "exact", "size"), spans_of(64))
def test_states_inside_of_a_prompt_are_those_of_pieces_that_end_there(
    size: tuple[int, int, int, int],
    span: int,
    exact: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Snapshots have equal bits. Results and the final state are unchanged."""
    monkeypatch.setattr(prompts, "SPAN", span)
    inputs, first, marks = make(150, size, device), 64, {64: 0, 128: 2}
    (z, weight, eps), (_, heads, key_dim, value_dim) = norm_of(inputs), size
    state = torch.randn(3, heads, key_dim, value_dim, device=device)
    plain, found = state.clone(), state.clone()
    want = run_prompt(inputs, (z, weight, eps), plain, first, 3, exact=exact)
    got = run_prompt(inputs, (z, weight, eps), found, first, 3, exact=exact, marks=marks)
    assert torch.equal(got, want) and torch.equal(found[1], plain[1])
    for at, slot in marks.items():
        ends, part = state.clone(), slice(at)
        some = replace(inputs, qkv=inputs.qkv[part], a=inputs.a[part], b=inputs.b[part])
        run_prompt(some, (z[part], weight, eps), ends, first, exact=exact)
        assert torch.equal(found[slot], ends[1])


@pytest.mark.parametrize(("span", "exact", "size"), spans_of(128))
def test_pieces_of_several_sequences_are_those_of_each_alone(
    size: tuple[int, int, int, int],
    span: int,
    exact: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bits equal single runs, snapshots included, at any place in the spans.

    Sequences begin, continue, or have no rows and keep their state.
    """
    monkeypatch.setattr(prompts, "SPAN", span)
    inputs, (_, heads, key_dim, value_dim) = make(768, size, device), size
    (z, weight, eps), starts = norm_of(inputs), [0, 192, 192, 256, 448, 512, 576, 768, 768]
    positions, slots, keeps = torch.full((3, 768), -1, device=device)
    pieces = ((0, 192, 150, 64), (192, 256, 3, 0), (256, 448, 192, 7))
    pieces += ((448, 512, 64, 2), (512, 576, 2, 0), (576, 768, 70, 64))
    for slot, (first, stop, count, at) in enumerate(pieces):
        slots[first:stop], last = slot, first + count
        positions[first:last] = torch.arange(at, at + count)
        for each in (inputs.qkv, inputs.a, inputs.b):
            each[last:stop] = NAN
    keeps[64], keeps[384], keeps[640] = 6, 7, 8
    state = torch.randn(9, heads, key_dim, value_dim, device=device)
    together, apart = state.clone(), state.clone()
    out = torch.full((2, *z.shape), NAN, device=device)
    norm, whole = (weight, eps), torch.tensor(starts, device=device)
    where = {"positions": positions, "slots": slots, "keeps": keeps}
    run = partial(delta_rule_prompt, exact=exact)
    run(out[0], inputs, z, norm, state=together, **where, starts=whole)
    for rows in (slice(first, stop) for first, stop, *_ in pieces):
        own = replace(inputs, qkv=inputs.qkv[rows], a=inputs.a[rows], b=inputs.b[rows])
        alone = {name: each[rows] for name, each in where.items()}
        run(out[1, rows], own, z[rows], norm, state=apart, **alone)
    assert torch.equal(together, apart) and torch.equal(*out)
    assert not any(torch.equal(each, before) for each, before in zip(together, state, strict=True))


def test_a_prompt_is_rounded_once(device: torch.device) -> None:
    inputs = make(3, SIZES[0], device)
    z, weight, eps = norm_of(inputs)
    positions = torch.arange(3, device=device)
    both = []
    for dtype in (torch.float32, torch.bfloat16):
        both.append(torch.empty(z.shape, dtype=dtype, device=device))
        state, slots = torch.zeros(1, 3, 8, 24, device=device), torch.zeros_like(positions)
        run = partial(delta_rule_prompt, state=state, positions=positions, slots=slots)
        run(both[-1], inputs, z, (weight, eps), exact=True)
    assert torch.equal(both[0].bfloat16(), both[1])


def test_equal_keys_do_not_cancel(device: torch.device) -> None:
    """Repeated tokens without decay give the worst system."""
    inputs = make(128, (1, 1, 16, 16), device)
    inputs.qkv.copy_(inputs.qkv[:1].clone().expand_as(inputs.qkv))
    inputs.a.fill_(-30.0)
    inputs.b.fill_(4.0)
    state, norm = torch.zeros(2, 1, 16, 16, device=device), norm_of(inputs)
    want, after = one_by_one(inputs, norm, state, 0)
    got = run_prompt(inputs, norm, state, 0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(state[1], after, rtol=0, atol=1e-4)


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("exact", [True, False])
def test_the_largest_heads(exact: bool, alike: float, device: torch.device) -> None:
    """TF32 operands lose up to 2^-11.

    After about six products this is 3e-3 of the result. bfloat16 operands would lose 2^-9 before
    the first product.
    """
    inputs = make(192, (1, 2, 128, 128), device)
    keys = inputs.qkv[:, 128:256]
    keys.mul_(1.0 - alike).add_(alike * torch.randn(128, device=device))
    state, norm = torch.randn(2, 2, 128, 128, device=device), norm_of(inputs)
    want, after = one_by_one(inputs, norm, state.double(), 7)
    got = run_prompt(inputs, norm, state, 7, exact=exact)
    for found, expected in ((got, want), (state[1], after)):
        assert (found - expected).norm() < (1e-5 if exact else 3e-3) * expected.norm()


def test_only_padding_leaves_the_state_as_it_is(device: torch.device) -> None:
    inputs = make(3, SIZES[0], device)
    state = torch.randn(1, 3, 8, 24, device=device)
    before = state.clone()
    positions = torch.full((3,), -1, device=device)
    slots = torch.zeros_like(positions)
    out, z = torch.full((2, 3, 72), NAN, device=device)
    norm = (torch.ones(24, device=device), 1e-6)
    for run in (partial(delta_rule_prompt, exact=True), delta_rule_step):
        run(out, inputs, z, norm, state=state, positions=positions, slots=slots)
        assert torch.equal(state, before) and not out.any()
