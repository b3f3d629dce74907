"""The kernels of generated engines: on a GPU as they run, in Triton's interpreter without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.targets.cuda.engine_generator.conftest import CONFIG, Folder
from tilewright.compiler.targets.cuda.engine_generator.parts import cuda_steps, launches
from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_steps import (
    Captured,
    CudaExecutor,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.engine import Engine
from tilewright.compiler.targets.cuda.engine_generator.parts.generated import PLAN
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices, Linear, Plan
from tilewright.compiler.targets.cuda.engine_generator.parts.products import APART, INSIDE
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import error_of
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings, read_settings
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound, with_ends
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text

PARTS = "tilewright.compiler.targets.cuda.engine_generator.parts"
CPU = torch.device("cpu")
TINY = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY |= {"hidden_size": 32, "intermediate_size": 40, "vocab_size": 37, "head_dim": 12}


class Interpreted(CudaExecutor):
    """Steps launched one by one, in parts of attention even where there is little of it."""

    splits = 1

    def _captured(self, kind: str, size: int, splits: int) -> Captured:
        inputs = torch.zeros(3, size, dtype=torch.int64)
        inputs[1] = -1
        graph: Any = None
        return Captured(graph, inputs, inputs)

    def _replay(self, found: Captured) -> torch.Tensor:
        return self._run_decode(found.inputs, self.splits)


def engines(style: str, folder: Folder) -> tuple[Interpreted, Engine, Reference]:
    config = {**CONFIG, **TINY, "rope_style": style}
    exact: Settings = read_settings(config, CPU)
    tensors = load_weights(folder(config), exact)
    half = dataclasses.replace(exact, dtype=torch.float16)
    executor = Interpreted(tensors, half, CPU)
    return executor, Engine(executor, half), Reference(tensors, exact, CPU)


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(0, 37, (length,)) for length in lengths]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs what it compiles")
@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_kernels_have_the_references_logits(
    style: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pages, and the library's products from few rows on: little to interpret. Decode
    attention takes several pages at once, or a part of one.
    """
    for part in ("pages", "cuda_steps", "launches"):
        monkeypatch.setattr(f"{PARTS}.{part}.PAGE", 32)
    keys = 64 if style == "interleaved" else 16
    chosen = dataclasses.replace(launches.CHOICES, keys=keys)
    monkeypatch.setattr(f"{PARTS}.launches.CHOICES", chosen)
    executor, engine, reference = engines(style, folder)

    def same(method: str, *given: Any) -> None:
        ours, theirs = (getattr(each, method)(*given) for each in (engine, reference))
        assert error_of(ours, theirs) < 0.3

    same("prefill", [4, 9], prompts(17, 3))  # few rows: products of ours
    same("decode", [9, 4], torch.tensor([5, 6]))
    executor.splits = 2
    same("decode", [4], torch.tensor([7]))
    if style == "interleaved":
        fewer = dataclasses.replace(chosen, columns=16, whole=1)
        monkeypatch.setattr(f"{PARTS}.products.CHOICES", fewer)
        same("prefill", [4], prompts(33))  # many: the library's, over two pages
        same("decode", [4, 9], torch.tensor([8, 1]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs what it compiles")
@pytest.mark.parametrize("way", [INSIDE, APART, launches.LIBRARY])
def test_every_way_of_a_product_is_the_same(way: str, folder: Folder) -> None:
    executor, _, _ = engines("half", folder)
    products = [each for each in executor.program if isinstance(each.does, Linear)]
    for each in products:
        assert each.weight is not None
        x = torch.randn(2, each.weight.shape[1]).half()
        residuals = [torch.ones(2, len(each.weight)).half() for _ in range(2)]
        one, other = residuals if each.does.residual else (None, None)
        ours = executor.product_by(way, each, x, one)
        expected = executor.product_by(launches.LIBRARY, each, x, other)
        assert error_of(ours, expected) < 0.3
    assert executor.ways(products[0], 2) == (INSIDE, APART, launches.LIBRARY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU times real steps")
def test_the_way_of_the_fastest_right_step_is_chosen(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _, _ = engines("half", folder)
    chosen: dict[Any, str] = {}
    for part in ("cuda_steps", "launches"):
        monkeypatch.setattr(f"{PARTS}.{part}.WAYS", chosen)
    monkeypatch.setattr(
        executor, "_step_time", lambda rows: 9.0 - list(chosen.values()).count(APART)
    )
    compute = executor.product_by

    def broken(way: str, each: Any, x: torch.Tensor, residual: Any) -> torch.Tensor:
        found = compute(way, each, x, residual)
        return found * 1.1 if way == INSIDE else found

    monkeypatch.setattr(executor, "product_by", broken)
    executor._time_products(2)
    ways = {bool(shape[4]): way for shape, way in chosen.items()}  # by whether there is a norm
    assert ways == {True: APART, False: launches.LIBRARY} and len(chosen) == 5


def test_rehearsed_calls_fit_into_a_new_engine(folder: Folder) -> None:
    executor, _, _ = engines("half", folder)
    calls, size = list(executor.rehearsals()), executor.pages.size
    assert {(4, 64), (8, 16), (1, 94)} <= set(calls)
    for count, length in calls:
        opened = [executor._open(length + 2) for _ in range(count)]
        assert executor.pages.size == size
        executor.release(*opened)


def test_values_end_with_their_last_reader() -> None:
    steps = (*PLAN.first, *PLAN.layer, *PLAN.layer, *PLAN.last)
    values = {each.out for each in steps if hasattr(each, "out")}
    program = with_ends([Bound(each, 0) for each in steps])
    layer = ["", "qkv", "heads", "", "inner"]
    ends = ["".join(values & {*each.ends}) for each in program]
    assert ends == ["", *layer, *layer, "x", "last"]


def test_prompts_are_cut_by_their_number_and_their_tokens() -> None:
    assert cuda_steps._cuts([1] * 40) == [16, 32, 40]
    assert cuda_steps._cuts([4096, 4096, 1, 9000]) == [2, 3, 4]


def test_slots_are_added_when_they_run_out(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PARTS}.cuda_steps.NUM_SLOTS", 2)
    executor, _, _ = engines("half", folder)
    table = executor._table.data_ptr()
    opened = [executor._open(70) for _ in range(5)]
    executor._upload_pages(opened)
    assert sorted(each.slot for each in opened) == [0, 1, 2, 3, 4]
    assert executor._slots.size == 6 and executor._table.data_ptr() == table
    for each in opened:
        assert executor._table[each.slot, 1] == each.pages[1] * executor.pages.page_size
    executor.release(*opened)
    assert executor._slots.size == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hidden-like", "grouped", "bfloat16", "in CUDA C++"])
def test_a_gpu_has_the_references_logits(name: str, plan: Plan, tmp_path: Path) -> None:
    from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import random_weights
    from tilewright.evaluate.measure.engine_check import load_engine

    changes: dict[str, dict[str, Any]] = {
        "hidden-like": {"hidden_size": 768, "intermediate_size": 3072, "head_dim": 192},
        "grouped": {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 61},
        "bfloat16": {"torch_dtype": "bfloat16", "rope_style": "half", "head_dim": 128},
        "in CUDA C++": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    }
    choices = Choices(products="cuda" if name == "in CUDA C++" else "triton")
    engine_file = tmp_path / "engine.py"
    text = engine_text(plan, choices, title="a test", num_layers=2)
    engine_file.write_text(text, encoding="utf-8")
    config = {**CONFIG, **changes[name], "max_position_embeddings": 1024}
    module, device = load_engine(str(engine_file)), torch.device("cuda")
    settings = read_settings(config, device)
    torch.save(random_weights(settings, 0), tmp_path / "model.pt")
    engine = module.create_engine(config, str(tmp_path), "cuda")
    reference = Reference(load_weights(str(tmp_path), settings), settings, device)
    worst, _ = module.compare(engine, reference, settings, seed=0, operations=100)
    assert worst < (4 if name == "bfloat16" else 1)
