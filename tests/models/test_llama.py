"""The Llama module, eager and whole: names, shapes, and transformers' numbers."""

from __future__ import annotations

import pytest
import torch

from tests.expected_rewrites import expected_rewrites
from tests.tiny import tiny_config, tiny_model
from tests.twins import assert_eager_equals_twin, twin_of
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.config import Llama3Scaling, RopeConfig

LLAMA3 = RopeConfig(theta=500000.0, scaling=Llama3Scaling(32.0, 1.0, 4.0, 64))


@pytest.mark.parametrize("head_dim", [8, 16, 128])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_eager_logits_and_names_are_transformers(head_dim: int, tied: bool, bias: bool) -> None:
    biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), bias)
    model = tiny_model(std=0.2, head_dim=head_dim, tie_embeddings=tied, **biases)
    assert_eager_equals_twin(model)


def test_scaled_frequencies_are_transformers() -> None:
    config = tiny_config(rope=LLAMA3, head_dim=64, max_positions=2048)
    theirs = twin_of(config)
    with torch.device("meta"):
        ours = LlamaForCausalLM(config)
    frequencies = ours.constants()["model.rotary.inv_freq"]
    assert torch.equal(frequencies, theirs.model.rotary_emb.inv_freq)
    plain = tiny_model(head_dim=64, rope=RopeConfig(theta=500000.0)).module.constants()
    assert not torch.equal(frequencies, plain["model.rotary.inv_freq"])


def test_constants_are_the_buffers() -> None:
    module = tiny_model().module
    constants = module.constants()
    assert {name: tuple(value.shape) for name, value in constants.items()} == {
        name: tuple(buffer.shape) for name, buffer in module.named_buffers()
    }
    assert all(value.dtype == torch.float32 for value in constants.values())
    assert not module.state_dict().keys() & constants.keys(), "no checkpoint holds them"


def test_tied_embeddings_are_one_parameter() -> None:
    module = tiny_model(tie_embeddings=True).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    module = tiny_model(tie_embeddings=False).module
    assert module.lm_head.weight is not module.model.embed_tokens.weight


def test_every_linear_layer_has_a_tensor_group() -> None:
    from fnmatch import fnmatchcase

    module = tiny_model().module
    for name, child in module.named_modules():
        groups = {g for glob, g in module.tensor_groups.items() if fnmatchcase(name, glob)}
        if isinstance(child, torch.nn.Linear | torch.nn.Embedding):
            assert len(groups) == 1, name


@pytest.mark.parametrize("num_layers", [1, 3])
def test_expected_rewrites_count_by_layer(num_layers: int) -> None:
    expected = expected_rewrites(tiny_model(num_layers=num_layers).config)
    assert expected["match_calls"] == 7 * num_layers + 2
    assert expected["fuse_rope_attention"] == num_layers
