"""Which algorithm a product of the library takes, without a GPU: a library made up says what it
proposes, and how long each takes is made up too. And on one: that all it proposes are right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.compiler.distributed.parallel import Parallel
from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda import cublaslt, fastest
from tilewright.compiler.targets.cuda.cublaslt import RefusedError, Shape
from tilewright.compiler.targets.cuda.fastest import Fastest, fastest_for
from tilewright.compiler.targets.cuda.library import add_product, store_product
from tilewright.compiler.targets.cuda.trials import VARIABLE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OWN, SLOW, FAST, REFUSED = b"own", b"slow", b"fast", b"refused"


class Made:
    """A library, and every product of it: what ran, and the microseconds that each way takes."""

    def __init__(self) -> None:
        self.ran: list[bytes] = []
        self.times = {OWN: 10.0, SLOW: 20.0, FAST: 5.0}
        self.most = 1000

    def product(self, shape: Shape) -> Any:
        made = self

        class Product:
            def __init__(self) -> None:
                self.shape = shape

            def proposals(self, most: int) -> list[bytes]:
                return [SLOW, FAST, REFUSED]

            def takes(self, algorithm: bytes) -> bool:
                return shape.num_rows <= made.most

            def run(self, algorithm: bytes, out: Tensor, x: Tensor, weight: Tensor) -> None:
                if algorithm == REFUSED:
                    raise RefusedError
                made.ran.append(algorithm)

        return Product()

    def timed(self, run: Callable[[], None], flushed: Tensor) -> float:
        run()
        return self.times[self.ran[-1]]

    def runs(self, found: Fastest, num_rows: int) -> bytes:
        """What runs a product of so many rows, once it was measured where it is."""
        x, weight, out = torch.ones(num_rows, 32), torch.ones(48, 32), torch.zeros(num_rows, 48)

        def default(out: Tensor, x: Tensor, weight: Tensor) -> None:
            self.ran.append(OWN)

        found.run(out, x, weight, default, adds=False)
        return self.ran[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    monkeypatch.setattr(fastest, "Library", lambda device: found)
    monkeypatch.setattr(fastest, "takes", lambda *given: True)
    monkeypatch.setattr(fastest, "_timed", found.timed)
    monkeypatch.setattr(fastest, "_OVER_CACHE", 1)
    monkeypatch.setattr(cublaslt, "_aligned", lambda operand: 256)  # a CPU's memory is less
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_the_fastest_that_runs_is_taken_from_then_on(made: Made) -> None:
    found = Fastest(CPU, {64})
    assert made.runs(found, 64) == FAST
    (chosen,) = found.found.values()
    assert (chosen.own, chosen.time) == (10.0, 5.0)
    made.ran.clear()
    assert made.runs(found, 64) == FAST and len(made.ran) == 1


def test_the_librarys_own_choice_stands_where_none_is_clearly_faster(made: Made) -> None:
    made.times[FAST] = 9.9
    found = Fastest(CPU, {64})
    made.runs(found, 64)
    assert made.runs(found, 64) == OWN and len(found.found) == 1


def test_other_rows_take_after_the_nearest_that_were_measured(made: Made) -> None:
    found = Fastest(CPU, {64, 512})
    assert made.runs(found, 300) == OWN  # nothing is known yet
    made.runs(found, 64)
    made.times[FAST] = 30.0
    made.runs(found, 512)
    assert [made.runs(found, n) for n in (70, 65, 400)] == [FAST, FAST, OWN]
    made.most = 65  # its algorithm does not take more
    assert made.runs(found, 80) == OWN


def test_nothing_is_measured_while_a_graph_is_captured(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Fastest(CPU, {64})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert made.runs(found, 64) == OWN and made.ran == [OWN] and not found.found


def test_what_is_kept_of_rows_that_were_not_measured_is_bounded(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastest, "_MOST_KEPT", 3)
    found = Fastest(CPU, {64})
    for num_rows in (64, 65, 66, 67, 68):
        made.runs(found, num_rows)
    assert [shape.num_rows for shape in found.found] == [64, 67, 68]


def test_bits_that_are_promised_and_ranks_leave_the_library_its_own_choice(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "library=fastest")
    device = torch.device("cuda")
    assert fastest_for(CompileOptions(), device, {64}) is not None
    for options in (
        CompileOptions(is_strict=True),
        CompileOptions(compute="exact"),
        CompileOptions(parallel=Parallel(tensor=2)),
    ):
        assert fastest_for(options, device, {64}) is None
    assert fastest_for(CompileOptions(), CPU, {64}) is None


def test_what_the_library_proposes_lies_as_its_header_says() -> None:
    proposal = cublaslt._Proposal
    assert ctypes.sizeof(proposal) == 96 and ctypes.sizeof(cublaslt._Algorithm) == 64
    assert (proposal.workspace.offset, proposal.state.offset) == (64, 72)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_all_that_is_proposed_are_the_product(adds: bool, dtype: torch.dtype) -> None:
    if adds and dtype == torch.bfloat16:
        pytest.skip("sums are float32")
    generator = torch.Generator(device=GPU).manual_seed(5)
    weight = torch.randn(1536, 1024, device=GPU, generator=generator).bfloat16()
    library = cublaslt.Library(GPU)
    for num_rows in (17, 64, 300):
        x = torch.randn(num_rows, 1152, device=GPU, generator=generator).bfloat16()[:, :1024]
        begin = torch.randn(num_rows, 1536, device=GPU, generator=generator).to(dtype)
        wanted = x.double() @ weight.double().T + (begin.double() if adds else 0.0)
        out = begin.clone()
        product = library.product(Shape.of(out, x, weight, adds=adds))
        proposals = product.proposals(24)
        assert len(proposals) > 4
        for algorithm in proposals:
            assert product.takes(algorithm)
            out.copy_(begin)
            product.run(algorithm, out, x, weight)
            bound = 4e-3 if dtype == torch.bfloat16 else 1e-5
            assert (out.double() - wanted).norm() <= bound * wanted.norm()


@pytest.mark.gpu
def test_a_captured_product_is_the_one_that_was_measured() -> None:
    generator = torch.Generator(device=GPU).manual_seed(6)
    weight = torch.randn(4096, 4096, device=GPU, generator=generator).bfloat16()
    x = torch.randn(64, 4096, device=GPU, generator=generator).bfloat16()
    found, out = Fastest(GPU, {64}), torch.zeros(64, 4096, device=GPU)
    found.run(out, x, weight, add_product, adds=True)
    once, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.run(out, x, weight, add_product, adds=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, once)
    store_product(out, x, weight)
    assert (out - once).norm() <= 1e-5 * once.norm()
