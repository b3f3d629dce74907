"""Gemma 3 with images on CUDA: image tokens attend in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.images.test_gemma_chats import CHATS, expected
from tests.images.test_vision_models import chat_of, picture
from tests.images.tiny_gemma import save_gemma, tiny_gemma
from tests.targets.cuda.test_images_cuda import preempted, scored
from tilewright import LLM

COUNT = 2
OPTIONS: dict[str, Any] = {
    **{"target": "cuda", "precision": "bf16", "max_model_len": 192, "use_cache": False}
}
LONG = "a question of a length such that the tokens of the image after it are on two of the pages"


@pytest.fixture(scope="module")
def model() -> Any:
    """transformers' model with weights that are exact in bfloat16."""
    made = tiny_gemma()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma(model, tmp_path_factory.mktemp("gemma") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, compute="exact", max_seats=2, **OPTIONS) as made:
        yield made


def test_a_batch_of_text_and_images_gives_the_tokens_of_transformers(model: Any, llm: LLM) -> None:
    every = [CHATS[name] for name in ("text", "two_images", "adjacent", "image_last")]
    answers = llm.chat([chat_of(*parts) for parts in every], max_tokens=COUNT, stop_token_ids=())
    for answer, parts in zip(answers, every, strict=True):
        assert list(answer.tokens) == expected(model, llm, parts, COUNT)[0]


def test_a_prefix_ends_before_an_image_on_two_pages(model: Any, llm: LLM) -> None:
    """The first page of a prompt that ends with an image has only some of its tokens."""
    prompt, images = llm._of_chat(chat_of(LONG[:44], picture(30, 30), LONG))
    assert images[0].first < 64 < images[0].end
    outputs, cached = [], []
    for end in (len(prompt), images[0].end, len(prompt)):
        with llm.stream_tokens(prompt[:end], images, max_tokens=2, stop_token_ids=()) as stream:
            for _ in stream:
                pass
            outputs.append(stream._request.output)
            cached.append(stream._request.num_cached)
    parts = (LONG[:44], picture(30, 30), LONG)
    assert outputs[0] == outputs[2] == expected(model, llm, parts, 2)[0]
    assert cached == [0, 0, 64 * (len(prompt) // 64)]


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_preempted_chat_continues_with_its_image(
    host_bytes: int, model: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (picture(24, 40, 9), "so?")
    output = preempted(llm, parts, host_bytes, monkeypatch)
    assert output == expected(model, llm, parts, 4)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("strict", ["never", "always"])
def test_decode_agrees_with_prefill(strict: str, folder: Path) -> None:
    """In strict arithmetic, a batch gives every chat its tokens."""
    with LLM(folder, max_seats=4, batch_invariant=strict, **OPTIONS) as llm:
        chats = [chat_of(*parts) for parts in CHATS.values()]
        sampling: dict[str, Any] = {"max_tokens": 6, "stop_token_ids": ()}
        for answer, chat in zip(llm.chat(chats, **sampling), chats, strict=True):
            if strict == "always":
                assert llm.chat(chat, **sampling).tokens == answer.tokens
        for parts in CHATS.values():
            prompt, images = llm._of_chat(chat_of(*parts))
            tokens, scores = scored(llm, prompt, images, 6)
            for at in (1, 5):
                _, again = scored(llm, (*prompt, *tokens[:at]), images, 1)
                assert abs(again[0][tokens[at]] - scores[at][tokens[at]]) < 0.2
