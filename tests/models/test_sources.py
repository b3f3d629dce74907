"""Parameters that are rows of a checkpoint's tensors, or kept with an offset."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compiler.driver import weight_source
from compiler.ir.recipe import Segment, WeightRecipe, load_dense
from models.sources import TensorSource, stored_shapes
from tests.tiny import tiny_model


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.empty(2, 3))
        self.two = nn.Parameter(torch.empty(4, 3))
        self.norm = nn.Parameter(torch.empty(3))
        self.tied = self.norm

    def sources(self) -> dict[str, TensorSource]:
        return {
            "one": TensorSource("both", (0, 2)),
            "two": TensorSource("both", (2, 6)),
            "norm": TensorSource("norm", offset=1.0),
        }


def test_shapes_are_those_of_the_stored_tensors() -> None:
    assert stored_shapes(Fused()) == {"both": (6, 3), "norm": (3,)}
    llama = tiny_model().module
    own = {name: tuple(weight.shape) for name, weight in llama.named_parameters()}
    assert llama.sources() == {} and stored_shapes(llama) == own


def test_rows_and_offsets_are_loaded() -> None:
    stored = torch.arange(18.0).view(6, 3)
    recipe = WeightRecipe((Segment("both", 4, rows=(2, 6), offset=0.5),), (4, 3))
    values = load_dense(recipe, {"both": stored}.__getitem__)
    assert torch.equal(values, stored[2:] + 0.5)
    values.zero_()
    assert stored[2:].any(), "what is kept is not what is handed out"


def test_only_the_last_shared_tensor_is_kept() -> None:
    model = tiny_model(model_type="phi3")
    get, reads = weight_source(model), model.checkpoint.reads
    names = [f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in (0, 0, 1, 1, 0)]
    found: list[Any] = [get(name) for name in names]
    assert reads == [names[0], names[2], names[4]]
    assert found[0] is found[1] and found[2] is found[3]
    get("model.norm.weight")
    assert get("model.norm.weight") is not None and reads[-2:] == ["model.norm.weight"] * 2
