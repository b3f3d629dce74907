"""delta_solve.cu against float64 and the Triton kernel: results, whole prompts, bits and errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from tilewright.compiler.targets.cuda.kernels.common.table import (
    ADA,
    EXACT,
    FAST,
    HOPPER,
    INTERPRETER,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_solve as native_delta_prompt
from tilewright.compiler.targets.cuda.kernels.delta_rule import prompt_triton as prompts
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_solve import delta_solve
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaInputs
from tilewright.compiler.targets.cuda.kernels.delta_rule.table import (
    SOLVE,
    TRITON,
    DeltaSite,
    bind_solve,
    why_no_solve,
)

NAN = float("nan")
C, D = 64, 128
HEADS = [(1, 1), (2, 4), (1, 3)]
"""Key heads, value heads."""

SIZES = [(64, 0), (150, 3), (1, 0), (63, 70), (129, 0)]
"""Tokens, padding behind them."""


@dataclass
class Prompt:
    """Operands within wider tensors, with NaN in place of missing tokens."""

    inputs: DeltaInputs
    positions: Tensor

    @classmethod
    def make(
        cls, count: int, padding: int, heads: tuple[int, int], device: torch.device, first: int = 0
    ) -> Prompt:
        key_heads, num_heads = heads
        width, rows = (2 * key_heads + num_heads) * D, count + padding
        qkv = torch.randn(rows, width + 12, device=device)
        ab = torch.randn(rows, 2 * num_heads + 3, device=device)
        qkv[count:], ab[count:] = NAN, NAN
        a, b = ab[:, 1 : num_heads + 1], ab[:, num_heads + 2 : -1]
        gates_of = torch.randn(2, num_heads, device=device)
        positions = torch.arange(first, first + rows, device=device)
        positions[count:] = -1
        qkv = qkv[:, 8 : width + 8]
        return cls(DeltaInputs(qkv, a, b, gates_of[0], gates_of[1], key_heads, D), positions)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the result shapes: from the state, corrections, keys, totals, scales."""
        chunks, heads = -(-len(self.positions) // C), self.inputs.num_heads
        key_heads = self.inputs.num_key_heads
        squares = [(chunks, heads, C, D), (chunks, heads, D, C), (chunks, key_heads, D, C)]
        return [*squares, (chunks, heads, C), (chunks, key_heads, 2, C)]

    def solve(self) -> list[Tensor]:
        """Run delta_solve.cu into NaN buffers."""
        device = self.positions.device
        left = [torch.full(shape, NAN, device=device) for shape in self.shapes]
        delta_solve(*left, inputs=self.inputs, positions=self.positions)
        return left

    def solve_in_triton(self, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        """Run the Triton kernel into NaN buffers."""
        device = self.positions.device
        left = [torch.full(shape, NAN, device=device) for shape in self.shapes]
        state = torch.zeros(1, self.inputs.num_heads, D, D, device=device)
        z = torch.zeros(len(self.positions), self.inputs.num_heads * D, device=device)
        with monkeypatch.context() as patch:
            for other in ("delta_states", "_outputs_kernel"):
                patch.setattr(prompts, other, Nothing())
            prompts._run_span(
                z,
                self.inputs,
                z,
                (torch.ones(D, device=device), 1e-6),
                scratch=prompts.DeltaScratch(state, *left),
                state=state,
                positions=self.positions,
                slots=torch.zeros_like(self.positions),
                keeps=None,
                starts=None,
                first=0,
                exact=False,
                is_native=False,
            )
        return left

    def run(self, state: Tensor, *, is_native: bool = True) -> Tensor:
        """Run the whole prompt in slot 0, with a norm that hides no errors."""
        inputs, device = self.inputs, self.positions.device
        rows, width = len(self.positions), inputs.num_heads * D
        z, out = torch.ones(rows, width, device=device), torch.full((rows, width), NAN)
        out, norm = out.to(device), (torch.ones(D, device=device), 1e-2)
        slots = torch.zeros_like(self.positions)
        prompts.delta_rule_prompt(
            out,
            inputs,
            z,
            norm,
            state=state,
            positions=self.positions,
            slots=slots,
            exact=False,
            is_native=is_native,
        )
        return out

    def expected(self) -> list[Tensor]:
        """Return the expected results in float64."""
        given, (shape, *_) = self.inputs, self.shapes
        chunks, heads = shape[:2]
        ratio, there = heads // given.num_key_heads, (self.positions >= 0)[:, None]
        missing = chunks * C - len(there)

        def by_chunk(x: Tensor, width: int = 1) -> Tensor:
            """Return ``[T, heads * width]`` as ``[N, heads, C, width]``, padded with zeros."""
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
            return x.view(chunks, C, -1, width).transpose(1, 2)

        qkv, a, b = (
            torch.where(there, each, 0.0).double() for each in (given.qkv, given.a, given.b)
        )
        decay = -given.a_log.double().exp() * softplus(a + given.dt_bias.double())
        q, k, v = (
            by_chunk(each, D) for each in qkv.split([given.num_key_heads * D] * 2 + [heads * D], 1)
        )
        q_scale, k_scale = ((each.square().sum(-1) + 1e-6).rsqrt() for each in (q, k))
        unit = k * k_scale[..., None]
        k, total = unit.repeat_interleave(ratio, 1), by_chunk(decay * there).squeeze(-1).cumsum(2)
        beta = by_chunk(b.sigmoid() * there)
        later = torch.ones(C, C, device=k.device).tril(-1).bool()
        kept = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -torch.inf).exp()
        eye = torch.eye(C, device=k.device, dtype=torch.float64)
        solved = torch.linalg.inv(eye + beta * (k @ k.mT) * kept) * beta.mT
        from_state, scales = -(solved * total.exp()[..., None, :]) @ k, (q_scale * D**-0.5, k_scale)
        return [from_state, (solved @ v).mT, unit.mT, total, torch.stack(scales, 2)]


class Nothing:
    """An empty kernel."""

    def __getitem__(self, grid: object) -> Nothing:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None


def check(found: list[Tensor], wanted: list[Tensor], of_products: float = 3e-3) -> None:
    """TF32 operands lose up to 2^-11 in several products. Sums of decays and scales are float32."""
    errors = (of_products, of_products, 5e-4, 1e-5, 1e-6)
    for got, want, error in zip(found, wanted, errors, strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= error * want.norm()
        torch.testing.assert_close(
            got.double(), want.double(), rtol=0, atol=10 * error * float(want.abs().max())
        )


def is_tf32(x: Tensor) -> bool:
    return not (x.view(torch.int32) & 0x1FFF).any()


def test_what_triton_leaves(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the Triton kernel with float64, also in its interpreter."""
    prompt = Prompt.make(63, 7, (1, 2), device)
    check(prompt.solve_in_triton(monkeypatch), prompt.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_what_it_leaves(
    size: tuple[int, int],
    heads: tuple[int, int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare with float64 and the Triton kernel. Bits are equal in each run."""
    prompt = Prompt.make(*size, heads, device)
    left = prompt.solve()
    check(left, prompt.expected())
    check(left, prompt.solve_in_triton(monkeypatch))
    assert is_tf32(left[0]) and is_tf32(left[2])
    for _ in range(5):
        assert all(map(torch.equal, prompt.solve(), left))


@pytest.mark.gpu
def test_a_chunk_does_not_depend_on_the_others(device: torch.device) -> None:
    """Also for any padding and any heads."""
    prompt = Prompt.make(192, 0, (2, 4), device)
    whole = prompt.solve()
    given = prompt.inputs
    rows = slice(64, 128)
    alone = replace(given, qkv=given.qkv[rows], a=given.a[rows], b=given.b[rows])
    for got, want in zip(Prompt(alone, prompt.positions[rows]).solve(), whole, strict=True):
        assert torch.equal(got[0], want[1])
    prompt.positions[128:], given.qkv[128:] = -1, NAN
    for got, want in zip(prompt.solve(), whole, strict=True):
        assert torch.equal(got[:2], want[:2])
    assert not any(each[2].any() for each in prompt.solve()[:4])


@pytest.mark.gpu
@pytest.mark.parametrize("step", [4.0, 100.0])
def test_equal_keys_do_not_cancel(step: float, device: torch.device) -> None:
    """Repeated tokens without decay give the worst system, and equal errors in all products of a
    key.
    """
    prompt = Prompt.make(128, 0, (1, 1), device)
    given = prompt.inputs
    given.qkv.copy_(given.qkv[:1].clone().expand_as(given.qkv))
    given.a.fill_(-30.0)
    given.b.fill_(step)
    check(prompt.solve(), prompt.expected(), 8e-3)


@pytest.mark.gpu
def test_extreme_gates(device: torch.device) -> None:
    """Immediate and no decay, full and no writes, and zero keys."""
    prompt = Prompt.make(64, 0, (1, 1), device)
    given = prompt.inputs
    given.a[::5], given.a[1::5] = 60.0, -60.0
    given.b[::3], given.b[1::3] = 100.0, -100.0
    given.qkv[7] = 0.0
    check(prompt.solve(), prompt.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("size", [(150, 3), (63, 70)])
def test_a_whole_prompt(
    size: tuple[int, int],
    first: int,
    device: torch.device,
) -> None:
    """Compare output and state with the Triton kernel."""
    prompt = Prompt.make(*size, (2, 4), device, first)
    start = torch.randn(1, 4, D, D, device=device)
    states = [start.clone() for _ in range(2)]
    native = prompt.run(states[0])
    triton = prompt.run(states[1], is_native=False)
    for got, want in ((native, triton), (states[0], states[1])):
        assert (got - want).norm() <= 3e-3 * want.norm()
    assert not native[size[0] :].any()


@pytest.mark.gpu
def test_chained_in_a_graph(device: torch.device) -> None:
    """Prompts in turn on the same state, replayed, equal single runs."""
    layers = [Prompt.make(256, 0, (4, 8), device) for _ in range(4)]
    wanted, left = [layer.solve() for layer in layers], layers[0].solve()
    kept = [[torch.empty_like(each) for each in left] for _ in layers]

    def run() -> None:
        for layer, copies in zip(layers, kept, strict=True):
            delta_solve(*left, inputs=layer.inputs, positions=layer.positions)
            for each, copy in zip(left, copies, strict=True):
                copy.copy_(each)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        for copies, want in zip(kept, wanted, strict=True):
            assert all(map(torch.equal, copies, want))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_dim": 64, "value_dim": 256}, "keys of 64 and values of 256 channels"),
        ({"is_aligned": False}, "rows of queries, keys and values that are not 16-byte aligned"),
        ({"gpu": INTERPRETER}, "no GPU"),
        ({"gpu": ADA}, "made for compute capability 9.0"),
        ({}, ""),
    ],
)
def test_what_it_does_not_take_is_said(changes: dict[str, Any], words: str) -> None:
    site = replace(DeltaSite(FAST, HOPPER, 1, 1, D, D, 4), **changes)
    assert why_no_solve(site) == words
    assert bind_solve(site) == (TRITON if words else SOLVE)
    assert bind_solve(replace(site, arithmetic=EXACT)) == TRITON


def test_the_source_has_the_kernel_and_its_shared_memory() -> None:
    """Two blocks fit a multiprocessor, with the reserved kilobyte per block."""
    source, shared = native_delta_prompt.SOURCE, native_delta_prompt._SHARED
    assert f" {source.names[0]}(const DeltaSolve p)" in source.path.read_text()
    assert shared % 16 == 0 and 2 * (shared + 1024) <= 228 * 1024
