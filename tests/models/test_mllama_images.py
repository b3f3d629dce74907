"""Llama 3.2 Vision with images against transformers: tower, cross-attention and visible rows.

transformers collects the outputs of the listed layers, and tokens before the first image have no
mask there. Both are corrected here: the model is trained with Meta's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.images.tiny_mllama import tiny_mllama
from tests.tiny import FakeCheckpoint, precision_of, random_tokens, tiny_config
from tilewright.compiler.driver import lower_model, weight_source
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.reference_tower import STAGES, compile_tower
from tilewright.compiler.targets.tile_encoder import padding_rows
from tilewright.compiler.tracer import grouped_modules
from tilewright.images.tiles import arrangements
from tilewright.images.visible import VisibleSpan, visible_images
from tilewright.models.architectures.mllama_cross import ImageEncoderModel, ImageTextForCausalLM
from tilewright.models.architectures.mllama_vision import TileTower, TileTowerConfig

IMAGE = 96
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_layers": 4},
    **{"num_global_layers": 2, "kept_layers": (1, 3), "patch_size": 14, "num_patches": 4},
    **{"norm_eps": 1e-5, "output_size": 48},
}
TOWER = TileTowerConfig(**SIZES)
ASPECTS = {"1x1": (1, 1), "1x2": (1, 2), "2x2": (2, 2), "4x1": (4, 1)}


@pytest.fixture(scope="module")
def pair() -> SimpleNamespace:
    """A tiny transformers model, and an equal model from its tensors."""
    theirs = tiny_mllama(
        std=0.1, image_id=IMAGE, vocab_size=96, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return SimpleNamespace(theirs=theirs, **_ours(theirs.state_dict()))


def _ours(state: dict[str, Tensor]) -> dict[str, Any]:
    named = {
        name.removeprefix("model.").replace("language_model.", "model."): each
        for name, each in state.items()
    }
    convolution = "vision_model.patch_embedding.weight"
    named[convolution] = named[convolution].flatten(1)
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "head_dim": 12}
    text = tiny_config(
        **{"model_type": "mllama", "tie_embeddings": False, "cross_layers": (1, 3), **sizes}
    )
    with torch.device("meta"):
        tower, model = TileTower(TOWER), ImageTextForCausalLM(text)  # type: ignore[arg-type]
        encoder = ImageEncoderModel(TOWER, text)  # type: ignore[arg-type]
    tower.load_state_dict(_values(tower, named), assign=True)
    encoder.load_state_dict(_values(encoder, named), assign=True)
    model.load_state_dict(_values(model, named), assign=True, strict=False)
    for name, value in model.constants().items():
        model.get_submodule(name.rpartition(".")[0]).inv_freq = value
    return {"tower": tower, "encoder": encoder, "model": model, "named": named, "config": text}


def _values(module: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's parameters from a checkpoint's tensors."""
    sources = module.sources()
    return {
        name: named[sources[name][0].tensor if name in sources else name]
        for name, _ in module.named_parameters()
    }


def _patches(pixels: Tensor) -> Tensor:
    """Return the patches of tiles ``[N, 3, 28, 28]``: ``[N, 4, 588]``."""
    grid = pixels.unflatten(2, (2, 14)).unflatten(4, (2, 14))
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _image(aspect: tuple[int, int], seed: int) -> SimpleNamespace:
    pixels = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
    used = aspect[0] * aspect[1]
    pixels[used:] = 0
    return SimpleNamespace(
        pixels=pixels, aspect_id=arrangements(4).index(aspect) + 1, num_tiles=used
    )


def _tower_inputs(image: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    is_padding = padding_rows(image.num_tiles, TOWER.max_tiles, TOWER.num_rows)
    aspect = torch.tensor([image.aspect_id])
    return _patches(image.pixels), aspect, torch.from_numpy(is_padding)


@torch.no_grad()
def _features(pair: SimpleNamespace, image: SimpleNamespace) -> Tensor:
    found: Tensor = pair.tower(*_tower_inputs(image))
    return found


def _inputs(images: list[SimpleNamespace]) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.stack([image.pixels for image in images])[None],
        "aspect_ratio_ids": torch.tensor([[image.aspect_id for image in images]]),
        "aspect_ratio_mask": torch.tensor([[_used(image) for image in images]]),
    }


def _used(image: SimpleNamespace) -> list[int]:
    return [int(tile < image.num_tiles) for tile in range(4)]


@pytest.mark.parametrize("aspect", ASPECTS.values(), ids=ASPECTS)
@torch.no_grad()
def test_features_equal_transformers(pair: SimpleNamespace, aspect: tuple[int, int]) -> None:
    image = _image(aspect, seed=sum(aspect))
    tower = pair.theirs.model.vision_model(**_inputs([image])).last_hidden_state
    expected = pair.theirs.model.multi_modal_projector(tower).flatten(0, -2)
    torch.testing.assert_close(_features(pair, image), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("weights", ["fp32", "bfp8"])
def test_traced_tower_on_the_reference(pair: SimpleNamespace, weights: str) -> None:
    """The graph of the tower computes what the module does. Formats reach its groups."""
    with torch.device("meta"):
        module = TileTower(TOWER)
    tower: Any = SimpleNamespace(
        name="tower", module=module, config=TOWER, checkpoint=FakeCheckpoint(pair.named)
    )
    resolved = precision_of(weights).resolve(4, "tower", modules=grouped_modules(module))
    graph_module, _ = lower_model(tower, resolved, STAGES, silent)
    image = _image((2, 2), seed=0)
    inputs = _tower_inputs(image)
    got = compile_tower(graph_module, weight_source(tower))(*(each.numpy() for each in inputs))
    error = (got - _features(pair, image)).abs().max()
    assert error < 1e-5 if weights == "fp32" else 1e-4 < error < 0.5


PROMPTS = {
    "image_first": ([IMAGE, 5, 6, 7], ["2x2"]),
    "image_after_text": ([5, 6, IMAGE, 7, 8], ["1x2"]),
    "two_images": ([5, IMAGE, 6, 7, IMAGE, 8, 9], ["1x1", "4x1"]),
    "adjacent_images": ([5, IMAGE, IMAGE, 6, IMAGE, 7], ["1x2", "1x1", "2x2"]),
}


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.no_grad()
def test_logits_equal_transformers(
    pair: SimpleNamespace, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, aspects = PROMPTS[prompt]
    tokens = tokens + random_tokens(3, vocab_size=96)
    images = [_image(ASPECTS[aspect], seed) for seed, aspect in enumerate(aspects)]
    expected = their_logits(pair.theirs, tokens, images, monkeypatch)
    got = _our_logits(pair, tokens, images)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    # The image matters, and more than the tolerance.
    blank = [SimpleNamespace(**{**vars(image), "pixels": image.pixels * 0}) for image in images]
    assert (_our_logits(pair, tokens, blank) - got).abs().max() > 0.01


@torch.no_grad()
def _cache_rows(pair: SimpleNamespace, image: SimpleNamespace) -> Tensor:
    """Return the keys and values of used tiles."""
    found: Tensor = pair.encoder(*_tower_inputs(image))
    return found[: image.num_tiles * TOWER.num_rows]


@torch.no_grad()
def _our_logits(pair: SimpleNamespace, tokens: list[int], images: list[Any]) -> Tensor:
    """Keys and values of used tiles only."""
    counts = [image.num_tiles * TOWER.num_rows for image in images]
    cache = torch.cat([_cache_rows(pair, image) for image in images])
    spans = visible_images(places_of(tokens))
    visible = torch.tensor(visible_rows(spans, counts, range(len(tokens))))
    positions = torch.arange(len(tokens))
    found: Tensor = pair.model(torch.tensor(tokens), positions, cache, visible)
    return found


def visible_rows(
    spans: Sequence[VisibleSpan], num_rows: Sequence[int], positions: range
) -> list[tuple[int, int]]:
    """Return the first visible row and the end per position.

    Args:
        spans: Result from `visible_images`.
        num_rows: Row count per image. Images are consecutive.
        positions: Positions in a chunk, or after the prompt.
    """
    starts = [0]
    for count in num_rows:
        starts.append(starts[-1] + count)
    rows = []
    for position in positions:
        last = next((span for span in reversed(spans) if span.start <= position), None)
        rows.append((0, 0) if last is None else (starts[last.first], starts[last.end]))
    return rows


def places_of(tokens: list[int]) -> list[int]:
    return [at for at, token in enumerate(tokens) if token == IMAGE]


def their_logits(
    theirs: Any,
    tokens: list[int],
    images: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    image_token: int = IMAGE,
) -> Tensor:
    mask = _their_mask(tokens, images, image_token)
    sees = mask.flatten(2).any(-1)[0].float()
    for layer in theirs.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            monkeypatch.setattr(layer.cross_attn, "forward", _masked(layer.cross_attn, sees))
    inputs = {**_inputs(images), "cross_attention_mask": mask}
    return theirs(torch.tensor([tokens]), **inputs).logits[0]


def _masked(module: Any, sees: Tensor) -> Any:
    forward = type(module).forward

    def masked(**inputs: Any) -> tuple[Tensor, Any]:
        attended, weights = forward(module, **inputs)
        return attended * sees[:, None], weights

    return masked


def _their_mask(tokens: list[int], images: list[Any], image_token: int) -> Tensor:
    from transformers.models.mllama import processing_mllama as processing

    spans = processing.get_cross_attention_token_mask(tokens, image_token)
    dense = processing.convert_sparse_cross_attention_mask_to_dense(
        [spans], [[image.num_tiles for image in images]], max_num_tiles=4, length=len(tokens)
    )
    return torch.from_numpy(np.asarray(dense))


def test_a_token_without_visible_rows_ignores_images(pair: SimpleNamespace) -> None:
    tokens = [5, 6, IMAGE, 7]
    found = [_our_logits(pair, tokens, [_image((2, 2), seed)]) for seed in (1, 2)]
    assert torch.equal(found[0][:2], found[1][:2])
    assert not torch.allclose(found[0][2:], found[1][2:])


def test_generated_tokens_see_the_last_images() -> None:
    spans = visible_images([0, 1, 3])
    assert visible_rows(spans, [3, 2, 4], range(7)) == [
        *((0, 3), (0, 5), (0, 5), (5, 9), (5, 9)),
        *((5, 9), (5, 9)),
    ]
    assert visible_images([]) == () and visible_rows((), [], range(1)) == [(0, 0)]
