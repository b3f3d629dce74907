"""The gated delta rule with its norm against the op: steps, prompts in chunks, odd sizes."""

from __future__ import annotations

import pytest
import torch

from compiler import ops
from compiler.ops.delta_rule import gates, recurrent_delta_rule, split_heads
from compiler.targets.cuda.kernels.delta_rule import DeltaInputs, delta_rule_step, gated_norm
from compiler.targets.cuda.kernels.delta_rule_prompt import delta_rule_prompt

NAN = float("nan")
SIZES = [(1, 3, 8, 24), (2, 4, 16, 16), (1, 1, 48, 40)]
"""Key heads, value heads, sizes of a key and of a value."""


def make(num_tokens: int, size: tuple[int, int, int, int], device: torch.device) -> DeltaInputs:
    """Inputs between other columns."""
    key_heads, heads, key_dim, value_dim = size
    width = 2 * key_heads * key_dim + heads * value_dim
    qkv = torch.randn(num_tokens, width + 5, device=device)[:, :width]
    ab = torch.randn(num_tokens, 2 * heads, device=device)
    a_log, dt_bias = torch.randn(2, heads, device=device)
    return DeltaInputs(qkv, ab[:, :heads], ab[:, heads:], a_log, dt_bias, key_heads, key_dim)


def some(inputs: DeltaInputs, rows: slice) -> tuple[object, ...]:
    """The op's arguments, of some tokens."""
    parts = (each[rows].clone() for each in (inputs.qkv, inputs.a, inputs.b))
    return (*parts, inputs.a_log, inputs.dt_bias, inputs.num_key_heads, inputs.key_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_some_sequences(
    size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """One goes on, one begins, one is padding, whose slot another has."""
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


def run_prompt(inputs: DeltaInputs, state: torch.Tensor, first: int, padding: int) -> torch.Tensor:
    """In slot 1, with tokens of NaN at negative positions behind the prompt's own."""
    count = len(inputs.qkv)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, padding), value=NAN)

    own = DeltaInputs(
        *map(padded, (inputs.qkv, inputs.a, inputs.b)),
        *(inputs.a_log, inputs.dt_bias, inputs.num_key_heads, inputs.key_dim),
    )
    out = torch.full((count + padding, inputs.num_heads * inputs.value_dim), NAN)
    out = out.to(state.device)
    positions = torch.arange(first, first + count + padding, device=state.device)
    positions[count:] = -1
    slots = torch.ones_like(positions)
    delta_rule_prompt(out, own, state=state, positions=positions, slots=slots)
    assert not out[count:].isnan().any()
    return out[:count]


@pytest.mark.parametrize(
    ("case", "first"),
    [((150, SIZES[0], 3), 7), ((64, SIZES[1], 0), 0), ((2, SIZES[2], 70), 7)],
)
def test_a_prompt_is_its_tokens_one_by_one(
    case: tuple[int, tuple[int, int, int, int], int], first: int, device: torch.device
) -> None:
    count, size, padding = case
    _, heads, key_dim, value_dim = size
    inputs = make(count, size, device)
    state = torch.randn(2, heads, key_dim, value_dim, device=device)
    before = state.clone()
    start = before[1] if first else torch.zeros_like(before[1])
    given = split_heads(inputs.qkv.clone(), size[0], key_dim, heads)
    decays = gates(inputs.a, inputs.b, inputs.a_log, inputs.dt_bias)
    want, after = recurrent_delta_rule(*given, *decays, start)
    got = run_prompt(inputs, state, first, padding)
    torch.testing.assert_close(got, want.flatten(1), rtol=0, atol=5e-5)
    torch.testing.assert_close(state[1], after, rtol=0, atol=5e-5)
    assert torch.equal(state[0], before[0])


def test_equal_keys_do_not_cancel(device: torch.device) -> None:
    """Where one token is said again and again, with nothing forgotten, the system is the worst."""
    inputs = make(128, (1, 1, 16, 16), device)
    inputs.qkv.copy_(inputs.qkv[:1].clone().expand_as(inputs.qkv))
    inputs.a.fill_(-30.0)
    inputs.b.fill_(4.0)
    state = torch.zeros(2, 1, 16, 16, device=device)
    given = split_heads(inputs.qkv.clone(), 1, 16, 1)
    decays = gates(inputs.a, inputs.b, inputs.a_log, inputs.dt_bias)
    want, after = recurrent_delta_rule(*given, *decays, state[1].clone())
    got = run_prompt(inputs, state, 0, 0)
    torch.testing.assert_close(got, want.flatten(1), rtol=0, atol=1e-4)
    torch.testing.assert_close(state[1], after, rtol=0, atol=1e-4)


def test_only_padding_leaves_the_state_as_it_is(device: torch.device) -> None:
    inputs = make(3, SIZES[0], device)
    state = torch.randn(1, 3, 8, 24, device=device)
    before = state.clone()
    positions = torch.full((3,), -1, device=device)
    slots = torch.zeros_like(positions)
    out, z = torch.empty(2, 3, 72, device=device)
    delta_rule_prompt(out, inputs, state=state, positions=positions, slots=slots)
    norm = (torch.ones(24, device=device), 1e-6)
    delta_rule_step(out, inputs, z, norm, state=state, positions=positions, slots=slots)
    assert torch.equal(state, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normed_and_gated(dtype: torch.dtype, device: torch.device) -> None:
    x, z = torch.randn(2, 3, 5 * 24 + 4, device=device)[:, :, : 5 * 24]
    weight = torch.rand(24, device=device)
    out = torch.full((3, 5 * 24 + 2), NAN, dtype=dtype, device=device)
    gated_norm(out[:, :-2], x, z, weight, eps=1e-6)
    normed = ops.rms_norm.reference(x.unflatten(1, (5, 24)), weight, 1e-6).flatten(1)
    want = torch.nn.functional.silu(z) * normed
    epsilon = 1e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(out[:, :-2].float(), want, rtol=epsilon, atol=1e-6)
    assert bool(out[:, -2:].isnan().all())
