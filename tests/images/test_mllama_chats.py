"""Chats with images of a tiny Llama 3.2 Vision: transformers' tokens, batches, caches, pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from tests.images.test_vision_models import chat_of, picture
from tests.images.tiny_mllama import IMAGE_ID, MEAN, STD, save_mllama, tiny_mllama
from tests.models.test_mllama_images import their_logits
from tilewright import LLM
from tilewright.compiler.targets.interface.step import EncodeImage, StateUpdate, Step, StepOutput
from tilewright.errors import RequestError
from tilewright.runtime.memory import image_cache

COUNT = 6
WIDE, TALL, SMALL = picture(50, 50), picture(20, 112, 3), picture(20, 20, 5)
CHATS = {
    "text": ("what?",),
    "image_first": (WIDE, "what is on this image?"),
    "image_last": ("what is", TALL),
    "two_images": ("a", SMALL, "b", WIDE, "c?"),
    "adjacent": ("a", TALL, SMALL, "b"),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_mllama()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mllama(model, tmp_path_factory.mktemp("mllama") / "tiny")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {} if request.param == "reference" else {"compute": "exact"}
    with LLM(
        folder, target=request.param, precision="reference", max_seats=4, use_cache=False, **options
    ) as made:
        yield made


def prepared(image: Image.Image) -> SimpleNamespace:
    """transformers' pixels."""
    size = {"height": 28, "width": 28}
    processor: Any = MllamaImageProcessorPil(size=size, image_mean=MEAN, image_std=STD)
    found = processor(image, return_tensors="np")
    return SimpleNamespace(
        pixels=torch.from_numpy(found["pixel_values"][0, 0]),
        aspect_id=int(found["aspect_ratio_ids"][0, 0]),
        num_tiles=int(found["num_tiles"][0][0]),
    )


@torch.no_grad()
def expected(model: Any, llm: LLM, parts: tuple[Any, ...], count: int = COUNT) -> list[int]:
    """transformers' greedy tokens, with the corrections of `their_logits`."""
    tokens = list(llm._of_chat(chat_of(*parts))[0])
    images = [prepared(part) for part in parts if not isinstance(part, str)]
    start = len(tokens)
    for _ in range(count):
        with pytest.MonkeyPatch.context() as patch:
            if images:
                logits = their_logits(model, tokens, images, patch, IMAGE_ID)
            else:
                logits = model(torch.tensor([tokens])).logits[0]
        tokens.append(int(logits[-1].argmax()))
    return tokens[start:]


@pytest.mark.parametrize("name", CHATS)
def test_chat_gives_the_tokens_of_transformers(name: str, model: Any, llm: LLM) -> None:
    answer = llm.chat(chat_of(*CHATS[name]), max_tokens=COUNT, stop_token_ids=())
    assert list(answer.tokens) == expected(model, llm, CHATS[name])


def test_a_batch_of_text_and_images_gives_the_tokens_of_each(model: Any, llm: LLM) -> None:
    chats = [chat_of(*parts) for parts in CHATS.values()]
    answers = llm.chat(chats, max_tokens=COUNT, stop_token_ids=())
    for answer, parts in zip(answers, CHATS.values(), strict=True):
        assert list(answer.tokens) == expected(model, llm, parts)


def test_an_image_is_encoded_once_and_another_shares_no_prefix(
    model: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable, edits = llm.compiled.executable, list[StateUpdate]()
    step = executable.step

    def recorded(given: Step) -> StepOutput:
        edits.extend(given.edits)
        return step(given)

    monkeypatch.setattr(executable, "step", recorded)
    text = "what do you see on this one?"
    cached = []
    for image in (picture(30, 30, 7), picture(30, 30, 7), picture(30, 30, 8)):
        answer = llm.chat(chat_of(image, text), max_tokens=COUNT, stop_token_ids=())
        assert list(answer.tokens) == expected(model, llm, (image, text))
        cached.append(answer.num_cached_tokens)
    assert len([edit for edit in edits if isinstance(edit, EncodeImage)]) == 2
    assert cached[1] > 20 and cached[2] <= len("user:")


def test_the_cpu_stores_bfloat16_images_with_the_bits_of_fp32(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_narrow in (True, False):
        options: dict[str, Any] = {"target": "cpu", "precision": "bf16", "use_cache": False}
        with LLM(folder, max_seats=1, **options) as llm:
            executable: Any = llm.compiled.executable
            assert executable.image_value_bytes == 2
            if not is_narrow:
                monkeypatch.setattr(executable, "stored_image", lambda values: values)
            prompt, images = llm._of_chat(chat_of(*CHATS["two_images"]))
            sampling: dict[str, Any] = {"max_tokens": COUNT, "logprobs": 5, "stop_token_ids": ()}
            with llm.stream_tokens(prompt, images, **sampling) as stream:
                for _ in stream:
                    pass
                found.append([position.top for position in stream._request.logprobs])
            sizes = {values.itemsize for values in executable._images.values()}
            assert sizes == {2 if is_narrow else 4}
    assert found[0] == found[1]


def test_penalties_ignore_the_placeholder(llm: LLM) -> None:
    answer = llm.chat(chat_of(SMALL, "x"), max_tokens=3, repetition_penalty=1.5)
    assert answer.tokens


def test_images_wait_for_the_pool_and_too_many_are_refused(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of five tiles: two requests with four tiles each run in turn."""
    row_bytes, rows = 4 * 2 * 2 * 2 * 12, 5
    monkeypatch.setattr(image_cache, "CROSS_CACHE_BYTES", 5 * rows * row_bytes)
    options: dict[str, Any] = {"target": "reference", "precision": "reference", "use_cache": False}
    with LLM(folder, max_seats=4, **options) as llm:
        chats = [(picture(50, 50, seed), "hm?") for seed in (1, 2)]
        found = llm.chat([chat_of(*parts) for parts in chats], max_tokens=4, stop_token_ids=())
        for answer, parts in zip(found, chats, strict=True):
            assert list(answer.tokens) == expected(model, llm, parts, 4)
        assert len(llm.compiled.executable._images) == 1  # type: ignore[attr-defined]
        with pytest.raises(RequestError, match=r"images: .* bytes of keys and values; allowed: up"):
            llm.chat(chat_of(*(part for chat in chats for part in chat)), max_tokens=4)


def test_a_compiled_folder_and_a_target_without_cross_layers(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    from tilewright.cli.main import main

    out = tmp_path / "compiled"
    options = ["--target", "cpu", "--precision", "reference", "--compute", "exact"]
    assert main(["compile", "--model", str(folder), "--output", str(out), *options]) == 0
    with LLM(out, max_seats=2) as llm:
        answer = llm.chat(chat_of(*CHATS["two_images"]), max_tokens=COUNT, stop_token_ids=())
        assert list(answer.tokens) == expected(model, llm, CHATS["two_images"])
        prompt, images = llm._of_chat(chat_of(WIDE, "what?"))
    refused = "images: tiny on target n150 takes text only; allowed: text"
    with LLM(folder, target="n150", precision="bf16", use_cache=False) as board:
        with pytest.raises(RequestError, match=refused):
            board.chat(chat_of(WIDE, "what?"))
        with pytest.raises(RequestError, match=refused):  # as `tilewright run --image` does
            board.stream_tokens(prompt, images)
