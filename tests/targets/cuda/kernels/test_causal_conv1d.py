"""The convolution and its window against the op, in steps, prompts and pieces of both."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler import ops
from tilewright.compiler.targets.cuda.kernels.delta_rule.causal_conv1d import (
    causal_conv1d_prompt,
    causal_conv1d_step,
)

NAN = float("nan")
SIZES = [(40, 4), (300, 2), (5, 3), (17, 9)]


def make(
    num_tokens: int, size: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x between other columns, the weight, poisoned results, and windows of three slots."""
    num_channels, width = size
    x = torch.randn(num_tokens, num_channels + 3, device=device)[:, :num_channels]
    weight = torch.randn(num_channels, width, device=device)
    out = torch.full((num_tokens, num_channels + 2), NAN, device=device)[:, :num_channels]
    return x, weight, out, torch.randn(3, num_channels, width - 1, device=device)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    positions: list[int],
    bounds: list[int],
    slots: list[int],
) -> torch.Tensor:
    where = (torch.tensor(each, device=x.device) for each in (positions, bounds, slots))
    found: torch.Tensor = ops.causal_conv1d_step.reference(x, weight[:, None], window, *where)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_some_sequences(size: tuple[int, int], device: torch.device) -> None:
    """One goes on, one begins, one is padding, whose slot another has."""
    x, weight, out, window = make(3, size, device)
    expected = window.clone()
    want = reference(x[:2], weight, expected, [5, 0], [0, 1, 2], [2, 1])
    positions, slots = torch.tensor([[5, 0, -1], [2, 1, 0]], device=device)
    causal_conv1d_step(out, x, weight, window=window, positions=positions, slots=slots)
    torch.testing.assert_close(out[:2], want)
    assert torch.equal(window, expected) and not out[2].any()


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_with_padding_behind_it(
    size: tuple[int, int], num_tokens: int, first: int, device: torch.device
) -> None:
    x, weight, out, window = make(num_tokens + 3, size, device)
    x[num_tokens:] = NAN
    expected = window.clone()
    places = list(range(first, first + num_tokens))
    want = reference(x[:num_tokens], weight, expected, places, [0, num_tokens], [1])
    positions = torch.tensor([*places, -1, -1, -1], device=device)
    slots = torch.ones_like(positions)
    causal_conv1d_prompt(out, x, weight, window=window, positions=positions, slots=slots)
    torch.testing.assert_close(out[:num_tokens], want)
    assert torch.equal(window, expected)


@pytest.mark.parametrize("size", SIZES)
def test_windows_inside_of_a_prompt_are_those_of_pieces_that_end_there(
    size: tuple[int, int], device: torch.device
) -> None:
    """To the bit; results and the prompt's own window are what they are without."""
    count, first, marks = 150, 64, {64: 0, 128: 2}
    x, weight, out, window = make(count + 3, size, device)
    positions = torch.arange(first, first + count + 3, device=device)
    positions[count:] = -1
    slots = torch.ones_like(positions)
    keeps = torch.full_like(positions, -1)
    for at, slot in marks.items():
        keeps[at] = slot
    plain, found = window.clone(), window.clone()
    where = {"positions": positions, "slots": slots}
    kept = torch.empty_like(out)
    causal_conv1d_prompt(out, x, weight, window=plain, **where)
    causal_conv1d_prompt(kept, x, weight, window=found, **where, keeps=keeps)
    assert torch.equal(kept[:count], out[:count]) and torch.equal(found[1], plain[1])
    for at, slot in marks.items():
        ends = window.clone()
        cut = {name: each[:at] for name, each in where.items()}
        causal_conv1d_prompt(out[:at], x[:at], weight, window=ends, **cut)
        assert torch.equal(found[slot], ends[1])


@pytest.mark.parametrize("size", SIZES)
def test_pieces_of_several_sequences_are_those_of_each_alone(
    size: tuple[int, int], device: torch.device
) -> None:
    """To the bit, with the windows inside of them, of eight: some begin and some go on; some have
    fewer tokens than the window, and those without rows leave every window as it is.
    """
    x, weight, out, window = make(768, size, device)
    positions, slots, keeps = torch.full((3, 768), -1, device=device)
    pieces = ((0, 192, 150, 64), (192, 256, 1, 5), (256, 448, 192, 0))
    pieces += ((448, 512, 64, 2), (512, 576, 2, 0), (576, 768, 70, 64))
    for slot, (first, stop, count, at) in enumerate(pieces):
        slots[first:stop], last = slot, first + count
        positions[first:last] = torch.arange(at, at + count)
        x[last:stop] = NAN
    keeps[64], keeps[384], keeps[640] = 6, 7, 8
    window = torch.cat([window] * 3)[:9]
    together, apart, alone = window.clone(), window.clone(), torch.empty_like(out)
    starts = torch.tensor([0, 192, 192, 256, 448, 512, 576, 768, 768], device=device)
    where = {"positions": positions, "slots": slots, "keeps": keeps}
    causal_conv1d_prompt(out, x, weight, window=together, **where, starts=starts)
    for rows in (slice(first, stop) for first, stop, *_ in pieces):
        own = {name: each[rows] for name, each in where.items()}
        causal_conv1d_prompt(alone[rows], x[rows], weight, window=apart, **own)
    is_token = positions >= 0
    assert torch.equal(together, apart) and torch.equal(out[is_token], alone[is_token])
    assert not any(torch.equal(*both) for both in zip(together, window, strict=True))


def test_only_padding_leaves_the_window_as_it_is(device: torch.device) -> None:
    x, weight, out, window = make(4, (6, 4), device)
    before = window.clone()
    positions = torch.full((4,), -1, device=device)
    slots = torch.zeros_like(positions)
    causal_conv1d_prompt(out, x, weight, window=window, positions=positions, slots=slots)
    causal_conv1d_step(out, x, weight, window=window, positions=positions, slots=slots)
    assert torch.equal(window, before)
