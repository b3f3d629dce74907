"""Images in prompts of a tiny Qwen3.5: transformers' pixels, embeddings and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.images.tiny_vl import processor_of_hf, save_vl, tiny_vl
from tilewright import LLM
from tilewright.compiler.targets.image_encoder import ImageEncoder
from tilewright.images.parts import Picture

SIZES = ((24, 40), (8, 8), (61, 30))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3))
    return Image.fromarray(values.astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_vl()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vl(model, tmp_path_factory.mktemp("vl") / "tiny")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {} if request.param == "reference" else {"compute": "exact"}
    with LLM(
        folder, target=request.param, precision="reference", max_seats=3, use_cache=False, **options
    ) as made:
        yield made


def chat_of(*parts: object) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def expected(model: Any, llm: LLM, parts: tuple[object, ...], count: int) -> list[int]:
    """transformers' greedy tokens for the same chat."""
    return scored(model, llm, parts, count)[0]


@torch.no_grad()
def scored(
    model: Any, llm: LLM, parts: tuple[object, ...], count: int
) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens for the same chat, and log probabilities ``[count, tokens]``."""
    (tokens, placed) = llm._of_chat(chat_of(*parts))
    inputs = {"input_ids": torch.tensor([tokens])}
    if placed:
        found = processor_of_hf()([p for p in parts if not isinstance(p, str)], return_tensors="pt")
        kinds = torch.tensor([[int(token == 259) for token in tokens]])
        inputs |= {**found, "mm_token_type_ids": kinds}
    how = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    made = model.generate(**inputs, max_new_tokens=count, output_logits=True, **how)
    return made.sequences[0, len(tokens) :].tolist(), torch.cat(made.logits).log_softmax(-1)


@pytest.mark.parametrize("size", [*SIZES, (200, 33), (5, 300)])
def test_prepare_is_the_processor_of_transformers(size: tuple[int, int], llm: LLM) -> None:
    encoder = llm.compiled.executable.encoder
    assert isinstance(encoder, ImageEncoder)
    image = picture(*size)
    prepared = encoder.settings.processor.prepare(Picture(image, "auto", "x"))
    patches, *_ = encoder.inputs(prepared.height, prepared.width, prepared.pixels)
    found = processor_of_hf()([image], return_tensors="np")
    assert found["image_grid_thw"].tolist() == [[1, 2 * prepared.rows, 2 * prepared.columns]]
    np.testing.assert_allclose(patches, found["pixel_values"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_encode_is_the_tower_of_transformers(size: tuple[int, int], model: Any, llm: LLM) -> None:
    encoder = llm.compiled.executable.encoder
    assert encoder is not None
    prepared = encoder.settings.processor.prepare(Picture(picture(*size), "auto", "x"))
    got = encoder.encode(prepared.height, prepared.width, prepared.pixels)
    found = processor_of_hf()([picture(*size)], return_tensors="pt")
    with torch.no_grad():
        theirs = model.model.visual(found["pixel_values"], found["image_grid_thw"]).pooler_output
    assert theirs.std() > 0.1
    np.testing.assert_allclose(got, theirs.numpy(), atol=1e-5, rtol=0)


CHATS = {
    "text": ("what?",),
    "image_first": (picture(24, 40), "what?"),
    "image_last": ("what is", picture(61, 30)),
    "two_images": ("a", picture(24, 40), "b", picture(16, 64, 3), "c?"),
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_gives_the_tokens_of_transformers(name: str, model: Any, llm: LLM) -> None:
    tokens, scores = scored(model, llm, CHATS[name], 8)
    prompt, images = llm._of_chat(chat_of(*CHATS[name]))
    sampling: dict[str, Any] = {"max_tokens": 8, "logprobs": 20, "stop_token_ids": ()}
    with llm.stream_tokens(prompt, images, **sampling) as stream:
        for _ in stream:
            pass
    assert stream._request.output == tokens
    for position, row in zip(stream._request.logprobs, scores, strict=True):
        assert len(position.top) == 20
        for token, score in position.top:
            assert abs(score - float(row[token])) < 1e-4


def test_a_batch_of_text_and_images_gives_the_tokens_of_each(model: Any, llm: LLM) -> None:
    chats = [chat_of(*parts) for parts in CHATS.values()]
    answers = llm.chat(chats, max_tokens=4, stop_token_ids=())
    for answer, parts in zip(answers, CHATS.values(), strict=True):
        assert list(answer.tokens) == expected(model, llm, parts, 4)
