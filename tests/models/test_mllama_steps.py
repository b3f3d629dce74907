"""Steps of the reference with Llama 3.2 Vision's images: chunks, decode and mixed batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models.test_mllama_images import IMAGE, TOWER, pair, places_of, their_logits
from tests.tiny import FakeCheckpoint, compiled, joined, leave_slot, precision_of, take_slot
from tilewright.compiler.driver import lower_model, weight_source
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.interface.step import (
    EncodeImage,
    ImageId,
    PrefillChunk,
    Slot,
    Step,
    VisibleImages,
)
from tilewright.compiler.targets.reference_tower import ENCODER_STAGES, compile_tower
from tilewright.compiler.targets.tile_encoder import TileEncoder, TileEncoderSettings
from tilewright.images.tiles import TileSettings, draw_canvas, tiles_of
from tilewright.images.visible import visible_images
from tilewright.models.architectures.mllama_cross import ImageEncoderModel, ImageTextForCausalLM

__all__ = ["pair"]

SETTINGS = TileSettings(
    image_token=IMAGE, patch_size=14, tile_size=28, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25)
)
SIZES = [(20, 20), (50, 50), (112, 20)]
"""Pictures with 1 x 1, 2 x 2 and 4 x 1 tiles."""

Request = tuple[list[int], list[int]]
REQUESTS: list[Request] = [
    ([5, IMAGE, IMAGE, 6, 7, IMAGE, 8, 9, 10], [0, 1, 2]),
    ([IMAGE, 11, 12, 13, 14], [2]),
    ([15, 16, 17, 18, 19, 20, 21], []),
]


@pytest.fixture(scope="module", params=["reference", "cpu-native"])
def executable(pair: SimpleNamespace, request: pytest.FixtureRequest) -> Any:
    """A target with four slots and all pictures."""
    config = pair.config
    with torch.device("meta"):
        module, encoder = ImageTextForCausalLM(config), ImageEncoderModel(TOWER, config)
    whole, images = (
        SimpleNamespace(
            name="tiny", module=own, config=sizes, checkpoint=FakeCheckpoint(pair.named)
        )
        for own, sizes in ((module, config), (encoder, TOWER))
    )
    found: Any = compiled(whole, request.param)
    precision = precision_of().resolve(config.num_layers, "tiny")
    lowered, _ = lower_model(images, precision, ENCODER_STAGES, silent)
    tower = compile_tower(lowered, weight_source(images))
    width = 2 * config.num_kv_heads * config.head_dim * len(config.cross_layers)
    settings = TileEncoderSettings(processor=SETTINGS, cross_width=width)
    found.encoder = TileEncoder(settings, lambda: tower)
    found.step(Step(edits=tuple(_encode(index) for index in range(len(SIZES)))))
    return found


def _picture(index: int) -> Image.Image:
    noise = np.random.default_rng(index).integers(0, 256, (*SIZES[index], 3), np.uint8)
    return Image.fromarray(noise)


def _encode(index: int) -> EncodeImage:
    canvas = draw_canvas(_picture(index), SETTINGS, max_tiles=4)
    height, width, _ = canvas.shape
    return EncodeImage(ImageId(index), height, width, canvas.tobytes())


def test_keys_and_values_have_the_format_of_their_group(executable: Any) -> None:
    encoder, edit = executable.encoder, _encode(0)
    whole = encoder.encode(edit.height, edit.width, edit.pixels)
    settings = msgspec.structs.replace(encoder.settings, cache_format="bf16")
    got = TileEncoder(settings, lambda: encoder._tower).encode(edit.height, edit.width, edit.pixels)
    assert (got == torch.from_numpy(whole).bfloat16().float().numpy()).all() and (
        got != whole
    ).any()


def _oracle(pair: SimpleNamespace, tokens: list[int], images: list[int]) -> Tensor:
    tiled = [
        tiles_of(draw_canvas(_picture(index), SETTINGS, max_tiles=4), SETTINGS) for index in images
    ]
    named = [
        SimpleNamespace(
            pixels=torch.from_numpy(each.pixels),
            aspect_id=each.aspect_id,
            num_tiles=each.num_tiles,
        )
        for each in tiled
    ]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if not images:
            logits: Tensor = pair.theirs(torch.tensor([tokens])).logits[0]
            return logits
        return their_logits(pair.theirs, tokens, named, patch)


def _prefill(executable: Any, slot: Slot, request: Request, start: int, end: int) -> Tensor:
    """Run a chunk with the images that its tokens see."""
    tokens, images = request
    spans = [span for span in visible_images(places_of(tokens)) if span.start < end]
    first = max((span.start for span in spans if span.start <= start), default=0)
    visible = tuple(
        VisibleImages(
            max(0, span.start - start),
            tuple(ImageId(index) for index in images[span.first : span.end]),
        )
        for span in spans
        if span.start >= first
    )
    chunk = PrefillChunk(slot, start, tuple(tokens[start:end]), echoes=True, visible=visible)
    return joined(executable.step(Step(prompts=(chunk,), want_logits=True)))


@pytest.mark.parametrize("sizes", [(9,), (2, 3, 4), (1, 1, 1, 1, 1, 4)])
def test_chunks_equal_transformers(
    pair: SimpleNamespace, executable: Any, sizes: tuple[int, ...]
) -> None:
    """Chunks cut between adjacent images, and between an image and its text."""
    slot, start, parts = take_slot(executable, 20), 0, []
    for size in sizes:
        parts.append(_prefill(executable, slot, REQUESTS[0], start, start + size))
        start += size
    leave_slot(executable, slot)
    expected = _oracle(pair, *REQUESTS[0])
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


def test_mixed_batches_decode_as_one_pass(pair: SimpleNamespace, executable: Any) -> None:
    """Requests with images and a text request decode together."""
    tails = [[22, 23, 24], [25, 26, 27], [28, 29, 30]]
    slots = [take_slot(executable, 20) for _ in REQUESTS]
    for slot, request in zip(slots, REQUESTS, strict=True):
        _prefill(executable, slot, request, 0, len(request[0]))
    got = []
    for at in range(3):
        forced = {slot: tail[at] for slot, tail in zip(slots, tails, strict=True)}
        step = Step(decode=tuple(slots), forced=forced, want_logits=True)
        got.append(joined(executable.step(step)))
    for slot in slots:
        leave_slot(executable, slot)
    for row, ((tokens, images), tail) in enumerate(zip(REQUESTS, tails, strict=True)):
        expected = _oracle(pair, tokens + tail, images)[-3:]
        decoded = torch.stack([logits[row] for logits in got])
        torch.testing.assert_close(decoded, expected, atol=1e-4, rtol=0)
