"""What a user's own module may not do is refused in one line that names the place, once models are
matched: before any target has a say.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import precision_of, tiny_model
from tilewright.compiler.driver import compile_model
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CompileError

BF16 = precision_of("bf16")


class Shifted(nn.Module):
    """A head with a bias of its own behind it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.inner = head
        self.offset = nn.Parameter(torch.empty(61, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = self.inner(x) + self.offset
        return shifted


def with_layer_norm() -> SimpleNamespace:
    model = tiny_model(num_layers=1)
    model.module.model.norm = nn.LayerNorm(32, device="meta")
    return model


def with_shifted_logits() -> SimpleNamespace:
    model = tiny_model(num_layers=1, tie_embeddings=False)
    model.module.lm_head = Shifted(model.module.lm_head)
    model.module.tensor_groups = {**model.module.tensor_groups, "lm_head.inner": "lm_head"}
    return model


def with_gated_logits() -> SimpleNamespace:
    model = tiny_model(num_layers=1)
    head = model.module.lm_head.forward
    model.module.lm_head.forward = lambda x: head(x) * head(x)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (with_layer_norm(), r"^model\.norm: calls aten\.layer_norm\.default, .*; allowed: "),
        (
            with_shifted_logits(),
            r"^lm_head: .*add.* reads parameter 'lm_head\.offset'; allowed: ",
        ),
        (with_gated_logits(), "^the model's result is not that of a linear layer; allowed: "),
    ],
    ids=["a LayerNorm", "a bias behind the head", "no head"],
)
def test_it_is_named(model: SimpleNamespace, said: str) -> None:
    with pytest.raises(CompileError, match=said) as caught:
        compile_model(model, BF16, target="cpu", options=CompileOptions(max_context=32))
    assert "\n" not in str(caught.value)
