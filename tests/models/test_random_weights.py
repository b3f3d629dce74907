"""Random weights: their values, that they come back, and where they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.checkpoints import random_weights
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.random_weights import STD, RandomCheckpoint
from tilewright.models.shapes import ShapeName, shape_config

EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"


def test_the_tensors_are_the_model_s() -> None:
    model = load_model("shape:tiny")
    checkpoint = model.checkpoint
    assert model.weights == "random" and checkpoint.files == ()
    expected = {name: tuple(weight.shape) for name, weight in model.module.named_parameters()}
    check_tensors(checkpoint, expected)
    for name, shape in expected.items():
        values = checkpoint.get(name)
        assert tuple(values.shape) == shape and values.dtype == torch.bfloat16
        assert values.nbytes == checkpoint.names[name].nbytes
        assert values.isfinite().all()


def test_values_are_normal_around_0_and_norms_around_1() -> None:
    checkpoint = load_model("shape:tiny").checkpoint
    values = checkpoint.get(EMBEDDING).float()
    assert abs(float(values.mean())) < STD / 20
    assert float(values.std()) == pytest.approx(STD, rel=0.05)
    norm = checkpoint.get(NORM).float()
    assert float(norm.mean()) == pytest.approx(1.0, abs=STD)
    assert 0 < float(norm.std()) < 2 * STD


def test_biases_of_qwen_are_small() -> None:
    checkpoint = load_model("shape:qwen2.5-7b").checkpoint
    values = checkpoint.get("model.layers.27.self_attn.k_proj.bias").float()
    assert tuple(values.shape) == (512,)
    assert float(values.std()) == pytest.approx(STD, rel=0.3)


def test_the_same_again_and_different_elsewhere() -> None:
    first, again = load_model("shape:tiny").checkpoint, load_model("shape:tiny").checkpoint
    values = first.get(EMBEDDING)
    torch.manual_seed(5)
    assert torch.equal(again.get(EMBEDDING), values), "no state of torch's own is used"
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    assert not torch.equal(first.get(up), first.get(gate))
    assert not torch.equal(first.get(up), first.get(up.replace("0", "1")))
    other = load_model("shape:llama-3.2-1b").checkpoint
    assert not torch.equal(other.get(NORM)[:64], first.get(NORM)), "another shape"


def test_a_tensor_is_fresh_and_torch_s_own_random_numbers_are_left_alone() -> None:
    checkpoint = load_model("shape:tiny").checkpoint
    before = torch.get_rng_state()
    values = checkpoint.get(NORM)
    assert torch.equal(torch.get_rng_state(), before)
    values.zero_()
    assert bool(checkpoint.get(NORM).any())


def test_rows_are_rows_of_the_whole() -> None:
    checkpoint = load_model("shape:tiny").checkpoint
    whole = checkpoint.get(EMBEDDING)
    for rows in (slice(3, 7), slice(None, 1), slice(500, 900), slice(5, 5)):
        part = checkpoint.get(EMBEDDING, rows)
        assert torch.equal(part, whole[rows])
        assert part.untyped_storage().nbytes() == part.nbytes, "the whole is not kept alive"


SIZES = {"w": (37, 24), "experts": (5, 6, 24), "vector": (700,)}
BOTH = (slice(1, 4), slice(2, 5))
PARTS: list[tuple[str, Any, Any, int]] = [
    ("w", None, None, 888),
    ("w", slice(3, 30), None, 648),
    ("w", slice(9, 9), None, 0),
    ("w", None, slice(5, 17), 888),
    ("w", slice(3, 30), slice(5, 17), 648),
    ("experts", slice(2, 5), None, 432),
    ("experts", slice(2, 5), slice(8), 432),
    ("experts", BOTH, None, 216),
    ("experts", BOTH, slice(20, 24), 216),
    ("vector", slice(10, 600), None, 590),
]


@pytest.mark.parametrize(("name", "rows", "columns", "most"), PARTS)
def test_a_part_is_the_whole_s_and_makes_no_more_than_its_blocks(
    name: str, rows: Any, columns: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``most``: values of the rows that it lies in."""
    monkeypatch.setattr(random_weights, "BLOCK", 32)
    monkeypatch.setattr(random_weights, "_STRIP", 192)
    shape = ShapeName("tiny")
    checkpoint = RandomCheckpoint(shape, shape_config(shape), SIZES)
    expected = checkpoint.get(name)
    for axis, each in enumerate(rows if isinstance(rows, tuple) else (rows or slice(None),)):
        expected = expected[(slice(None),) * axis + (each,)]
    expected = expected[..., columns or slice(None)]
    drawn: list[int] = []
    normal = torch.Tensor.normal_

    def counted(values: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        drawn.append(values.numel())
        return normal(values, *given, **named)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    part = checkpoint.get(name, rows, columns)
    assert torch.equal(part, expected) and part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes, "no more is kept alive"
    num_pieces = most // 192 + 3
    assert max(drawn, default=0) <= 32 and sum(drawn) <= most + 2 * 31 * num_pieces


def test_made_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one device here: what is asked of torch is looked at, not where it went."""
    checkpoint = load_model("shape:tiny").checkpoint
    asked: list[torch.device] = []
    empty = torch.empty

    def recorded(*sizes: object, device: torch.device, **options: object) -> torch.Tensor:
        asked.append(device)
        return empty(*sizes, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", recorded)
    with torch.device("cpu:0"):
        checkpoint.get(NORM)
    assert asked == [torch.device("cpu:0")]


@pytest.mark.gpu
def test_made_on_the_gpu() -> None:
    checkpoint = load_model("shape:tiny").checkpoint
    with torch.device("cuda"):
        values, again = checkpoint.get(EMBEDDING), checkpoint.get(EMBEDDING)
    assert values.is_cuda and torch.equal(values, again)
    assert float(values.float().std()) == pytest.approx(STD, rel=0.05)
    assert checkpoint.get(EMBEDDING).device.type == "cpu"


def test_a_name_that_is_not_there() -> None:
    checkpoint = load_model("shape:llama-3.2-1b").checkpoint
    with pytest.raises(CheckpointError, match=r"shape:llama-3.2-1b: no tensor nosuch; allowed: "):
        checkpoint.get("nosuch")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is tied to the embedding"):
        checkpoint.get("lm_head.weight")


def test_a_shape_s_hash_is_its_own() -> None:
    names = ("tiny", "llama-3.2-1b", "llama-3.1-8b")
    hashes = [load_model(f"shape:{name}").checkpoint.content_hash() for name in names]
    assert len(set(hashes)) == len(names)
    assert hashes[0] == load_model("shape:tiny").checkpoint.content_hash()
    assert all(len(each) == 64 and int(each, 16) for each in hashes)
