"""Chats with images of a tiny Gemma 3: transformers' pixels, tower, logits and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.images.test_vision_models import chat_of, picture
from tests.images.tiny_gemma import IMAGE_ID, PROCESSOR, save_gemma, tiny_gemma
from tilewright import LLM
from tilewright.compiler.targets.image_encoder import SquareEncoder
from tilewright.compiler.targets.interface.step import PrefillChunk, Step, StepOutput
from tilewright.errors import RequestError
from tilewright.images.parts import Picture

COUNT, NUM_TOKENS = 6, 16
CHATS = {
    "text": ("what?",),
    "image_first": (picture(50, 50), "what is on this image?"),
    "image_last": ("what is", picture(20, 112, 3)),
    "two_images": ("a", picture(20, 20, 5), "b", picture(70, 31), "c, and so on?"),
    "adjacent": ("a", picture(20, 20, 5), picture(70, 31), "b"),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_gemma()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(model, tmp_path_factory.mktemp("gemma") / "tiny")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    exact: dict[str, Any] = {} if request.param == "reference" else {"compute": "exact"}
    options = {**exact, "precision": "reference", "use_cache": False}
    with LLM(folder, target=request.param, max_seats=3, **options) as made:
        yield made


def inputs_of(tokens: list[int], parts: tuple[object, ...]) -> dict[str, Any]:
    """transformers' inputs."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
    images = [part for part in parts if not isinstance(part, str)]
    if images:
        pixels = Gemma3ImageProcessorPil(**PROCESSOR)(images, return_tensors="pt")["pixel_values"]
        kinds = torch.tensor([[int(token == IMAGE_ID) for token in tokens]])
        inputs |= {"pixel_values": pixels, "token_type_ids": kinds}
    return inputs


@torch.no_grad()
def expected(
    model: Any, llm: LLM, parts: tuple[object, ...], count: int = COUNT
) -> tuple[list[int], np.ndarray]:
    """transformers' greedy tokens without its cache, and their log probabilities."""
    tokens, scores = list(llm._of_chat(chat_of(*parts))[0]), []
    start = len(tokens)
    for _ in range(count):
        logits = model(**inputs_of(tokens, parts), use_cache=False).logits[0, -1]
        scores.append(logits.log_softmax(-1).numpy())
        tokens.append(int(logits.argmax()))
    return tokens[start:], np.array(scores)


def test_prepare_is_the_processor_of_transformers(llm: LLM) -> None:
    encoder = llm.compiled.executable.encoder
    assert isinstance(encoder, SquareEncoder)
    for size in ((56, 56), (20, 112), (200, 33)):
        prepared = encoder.settings.processor.prepare(Picture(picture(*size), "auto", "x"))
        got = encoder.patches(prepared.height, prepared.width, prepared.pixels)
        pixels = Gemma3ImageProcessorPil(**PROCESSOR)([picture(*size)], return_tensors="np")
        grid = pixels["pixel_values"][0].reshape(3, 8, 7, 8, 7).transpose(1, 3, 0, 2, 4)
        np.testing.assert_allclose(got, grid.reshape(64, -1), atol=1e-6, rtol=0)


@torch.no_grad()
def test_encode_is_the_tower_of_transformers(model: Any, llm: LLM) -> None:
    encoder = llm.compiled.executable.encoder
    assert isinstance(encoder, SquareEncoder)
    prepared = encoder.settings.processor.prepare(Picture(picture(20, 112), "auto", "x"))
    got = encoder.encode(prepared.height, prepared.width, prepared.pixels)
    pixels = Gemma3ImageProcessorPil(**PROCESSOR)([picture(20, 112)], return_tensors="pt")
    theirs = model.model.get_image_features(pixels["pixel_values"]).pooler_output[0]
    assert theirs.std() > 0.1 and got.shape == (NUM_TOKENS, 48)
    np.testing.assert_allclose(got * 48**0.5, theirs.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CHATS)
def test_chat_gives_the_tokens_of_transformers(name: str, model: Any, llm: LLM) -> None:
    parts = CHATS[name]
    tokens, scores = expected(model, llm, parts)
    prompt, images = llm._of_chat(chat_of(*parts))
    sampling: dict[str, Any] = {"max_tokens": COUNT, "logprobs": 20, "stop_token_ids": ()}
    with llm.stream_tokens(prompt, images, **sampling) as stream:
        for _ in stream:
            pass
        assert stream._request.output == tokens
        for position, row in zip(stream._request.logprobs, scores, strict=True):
            for token, score in position.top:
                assert abs(score - row[token]) < 1e-4


@pytest.mark.parametrize("size", [5, 20, 64])
def test_chunks_never_cut_an_image(
    size: int, model: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an image has more tokens than the budget. Text runs with images."""
    executable, chunks = llm.compiled.executable, list[PrefillChunk]()
    step = executable.step

    def recorded(given: Step) -> StepOutput:
        chunks.extend(given.prompts)
        return step(given)

    monkeypatch.setattr(executable, "step", recorded)
    monkeypatch.setattr(llm._loop.scheduler._prefill, "_most", size)
    chats = [chat_of(*parts) for parts in CHATS.values()]
    answers = llm.chat(chats, max_tokens=COUNT, stop_token_ids=())
    for answer, parts in zip(answers, CHATS.values(), strict=True):
        assert list(answer.tokens) == expected(model, llm, parts)[0]
    runs = [rows for chunk in chunks for rows in chunk.images]
    assert runs and all((rows.first, rows.count) == (0, NUM_TOKENS) for rows in runs)
    assert max(len(chunk.tokens) for chunk in chunks) <= max(size, NUM_TOKENS)


def test_a_prompt_with_an_image_at_its_end_computes_the_whole_image_again(llm: LLM) -> None:
    """Else the prefix cache would have all but the last token."""
    prompt, images = llm._of_chat(chat_of("see", picture(9, 9, 4)))
    prompt = prompt[: images[0].end]
    outputs, cached = [], []
    for _ in range(2):
        with llm.stream_tokens(prompt, images, max_tokens=3, stop_token_ids=()) as stream:
            for _ in stream:
                pass
            outputs.append(stream._request.output)
            cached.append(stream._request.num_cached)
    assert outputs[0] == outputs[1] and cached[1] == images[0].first


def test_a_prefix_with_another_image_is_not_shared(model: Any, llm: LLM) -> None:
    cached = []
    for seed in (1, 1, 2):
        parts = ("what do you see on this one?", picture(32, 32, seed))
        answer = llm.chat(chat_of(*parts), max_tokens=2, stop_token_ids=())
        assert list(answer.tokens) == expected(model, llm, parts, 2)[0]
        cached.append(answer.num_cached_tokens)
    assert cached[1] >= cached[2] > 0


def test_onnx_runtime_refuses_images_by_name(folder: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16", "use_cache": False, "max_model_len": 64}
    with (
        LLM(folder, target="cpu", backend="onnxruntime", max_seats=1, **options) as llm,
        pytest.raises(RequestError, match="takes text only; allowed: text"),
    ):
        llm.chat(chat_of(*CHATS["image_first"]))
