"""Two parts of a pass at once: both behind what was before, and what comes behind both."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tilewright.compiler.targets.cuda.steps.overlap import SideStream

_ROWS = 2048


def test_without_a_gpu_one_runs_behind_the_other() -> None:
    ran: list[str] = []
    SideStream(torch.device("cpu")).run(partial(ran.append, "first"), partial(ran.append, "second"))
    assert ran == ["first", "second"]


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_both_see_what_was_before_and_are_seen_behind(is_captured: bool) -> None:
    """Long products before, in both parts and between them, with memory of their own."""
    device = torch.device("cuda")
    beside = SideStream(device)
    x = torch.eye(_ROWS, device=device)
    y, left, right, total = (torch.zeros_like(x) for _ in range(4))

    def part(out: torch.Tensor, factor: float) -> None:
        held = y @ x
        for _ in range(4):
            held = held @ x
        torch.mul(held, factor, out=out)

    def run() -> None:
        torch.matmul(x, x, out=y)
        for _ in range(3):
            y.add_(x)
            beside.run(lambda: part(left, 2.0), lambda: part(right, 3.0))
            torch.add(left, right, out=total)
            y.copy_(total)

    run()
    expected = torch.eye(_ROWS, device=device) * 280.0
    assert torch.equal(total, expected)
    if is_captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(5):
            total.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(total, expected)
