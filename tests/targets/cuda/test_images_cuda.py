"""Images in prompts on CUDA: transformers' tokens, mixed batches, prefixes and preemption."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.images import test_mllama_chats as mllama
from tests.images.test_vision_models import CHATS, chat_of, expected, picture
from tests.images.tiny_mllama import save_mllama, tiny_mllama
from tests.images.tiny_vl import save_vl, tiny_vl
from tilewright import LLM
from tilewright.compiler.targets.cuda.kernels.attention.rotate_offsets import rotate_offsets
from tilewright.compiler.targets.interface.step import (
    ImageId,
    ImageRows,
    PrefillChunk,
    Slot,
    VisibleImages,
)
from tilewright.runtime.memory import image_cache
from tilewright.runtime.scheduling.request_state import RequestState

COUNT = 3


@pytest.fixture(scope="module")
def model() -> Any:
    """transformers' model with weights that are exact in bfloat16."""
    made = tiny_vl()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vl(model, tmp_path_factory.mktemp("vl") / "tiny")


OPTIONS: dict[str, Any] = {
    **{"target": "cuda", "precision": "bf16", "max_model_len": 192, "use_cache": False}
}


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, compute="exact", max_seats=2, **OPTIONS) as made:
        yield made


def test_a_batch_of_text_and_images_gives_the_tokens_of_transformers(model: Any, llm: LLM) -> None:
    """Two slots for four chats: text runs with images, and after them in their slots."""
    answers = llm.chat(
        [chat_of(*parts) for parts in CHATS.values()], max_tokens=COUNT, stop_token_ids=()
    )
    for answer, parts in zip(answers, CHATS.values(), strict=True):
        assert list(answer.tokens) == expected(model, llm, parts, COUNT)


def preempted(
    llm: LLM, parts: tuple[Any, ...], host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return a preempted chat's output. The previous step is unread at preemption."""
    scheduler, executable = llm._loop.scheduler, llm._loop.executable
    ahead = dataclasses.replace(executable.capabilities, runs_ahead=True)
    monkeypatch.setattr(executable, "capabilities", ahead)
    monkeypatch.setattr(scheduler.places, "_most_bytes", host_bytes)
    decode_rows = scheduler._decode_rows
    with llm.stream_chat(chat_of(*parts), max_tokens=COUNT + 1, stop_token_ids=()) as stream:
        request = stream._request

        def preempt_once() -> list[RequestState]:
            if len(request.output) == 2 and not request.num_preemptions:
                scheduler._preempt(request)
            return decode_rows()

        monkeypatch.setattr(scheduler, "_decode_rows", preempt_once)
        llm._loop.add(request)
        while request.finish_reason is None:
            llm._loop.step()
    assert request.num_preemptions == 1
    return request.output


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_preempted_chat_continues_with_its_image(
    host_bytes: int, model: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is swapped out, or computed again."""
    parts = (picture(24, 40, 9), "so?")
    output = preempted(llm, parts, host_bytes, monkeypatch)
    assert output == expected(model, llm, parts, COUNT + 1)


def test_a_prefix_with_another_image_is_not_shared(model: Any, llm: LLM) -> None:
    before = "a question that is longer than a page of the cache, which has sixty-four positions "
    cached = []
    for seed in (1, 1, 2):
        parts = (picture(32, 32, seed), before)
        answer = llm.chat(chat_of(*parts), max_tokens=2, stop_token_ids=())
        assert list(answer.tokens) == expected(model, llm, parts, 2)
        cached.append(answer.num_cached_tokens)
    assert cached[1] >= 64 and cached[2] == 0


@pytest.mark.gpu
def test_decode_steps_agree_with_prefill_in_fast_arithmetic(folder: Path) -> None:
    """Captured decode steps add the rotary offsets of their slots."""
    with LLM(folder, max_seats=4, **OPTIONS) as llm:
        for parts in CHATS.values():
            prompt, images = llm._of_chat(chat_of(*parts))
            tokens, scores = scored(llm, prompt, images, 6)
            for at in (1, 5):
                _, again = scored(llm, (*prompt, *tokens[:at]), images, 1)
                assert abs(again[0][tokens[at]] - scores[at][tokens[at]]) < 0.2


def scored(
    llm: LLM, prompt: tuple[int, ...], images: Any, count: int
) -> tuple[list[int], list[dict[int, float]]]:
    """Return a continuation's tokens, and log probabilities at every position."""
    sampling: dict[str, Any] = {"max_tokens": count, "logprobs": 20, "stop_token_ids": ()}
    with llm.stream_tokens(prompt, images, **sampling) as stream:
        for _ in stream:
            pass
        return stream._request.output, [dict(each.top) for each in stream._request.logprobs]


@pytest.mark.gpu
def test_a_batch_gives_the_tokens_of_each_chat_in_strict_arithmetic(folder: Path) -> None:
    with LLM(folder, max_seats=4, batch_invariant="always", **OPTIONS) as llm:
        chats = [chat_of(*parts) for parts in CHATS.values()]
        sampling: dict[str, Any] = {"max_tokens": 12, "stop_token_ids": ()}
        together = llm.chat(chats, **sampling)
        for answer, chat in zip(together, chats, strict=True):
            assert llm.chat(chat, **sampling).tokens == answer.tokens


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("by_pair", [False, True])
def test_rotate_offsets_turns_queries_and_keys(
    interleaved: bool, by_pair: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    tokens, heads, dim, pairs = 3, 3, 20, 6
    whole = torch.randn(tokens, 5 * dim + 7, device=device)
    qkv, inv_freq = whole[:, : 5 * dim], torch.rand(pairs, device=device)
    shape = (tokens, pairs) if by_pair else (tokens,)
    offsets = torch.randint(-900, 900, shape, device=device)
    offsets[1] = 0
    before = whole.clone()
    rotate_offsets(qkv, offsets, inv_freq, num_heads=heads, head_dim=dim, interleaved=interleaved)
    x = before[:, : heads * dim].double().view(tokens, heads, dim)[..., : 2 * pairs]
    x = x.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    first, second = x.unbind(-1 if interleaved else -2)
    angle = (offsets.double() if by_pair else offsets.double()[:, None]) * inv_freq.double()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    wanted = torch.stack(turned, -1 if interleaved else -2).flatten(-2)
    got = whole[:, : heads * dim].view(tokens, heads, dim)
    torch.testing.assert_close(got[..., : 2 * pairs].double(), wanted, atol=1e-4, rtol=0)
    assert torch.equal(got[..., 2 * pairs :], before[:, : heads * dim].view_as(got)[..., 12:])
    assert torch.equal(whole[:, heads * dim :], before[:, heads * dim :])
    assert torch.equal(whole[1], before[1])  # an offset of 0 changes no bits


def test_a_slice_of_a_chunk_has_its_images() -> None:
    chunk = PrefillChunk(
        Slot(0),
        10,
        tuple(range(6)),
        images=(ImageRows(1, ImageId(7), 3, 4),),
        visible=(VisibleImages(0, (ImageId(1),)), VisibleImages(3, (ImageId(2),))),
        rotary=tuple(range(18)),
    )
    left, right = chunk.slice(10, 14), chunk.slice(14, 16)
    assert left.images == (ImageRows(1, ImageId(7), 3, 3),)
    assert right.images == (ImageRows(0, ImageId(7), 6, 1),)
    assert left.rotary == (0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15)
    assert right.rotary == (4, 5, 10, 11, 16, 17)
    assert left.visible == chunk.visible and right.visible == (VisibleImages(0, (ImageId(2),)),)


@pytest.fixture(scope="module")
def tiled() -> Any:
    """transformers' Llama 3.2 Vision."""
    made = tiny_mllama()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    return made


@pytest.fixture(scope="module")
def tiled_folder(tiled: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mllama(tiled, tmp_path_factory.mktemp("mllama") / "tiny")


@pytest.fixture(scope="module")
def tiled_llm(tiled_folder: Path) -> Iterator[LLM]:
    with LLM(tiled_folder, compute="exact", max_seats=3, **OPTIONS) as made:
        yield made


def test_cross_layers_give_the_tokens_of_transformers(tiled: Any, tiled_llm: LLM) -> None:
    """Text and images decode together. Chunks cut a prompt between its images."""
    llm = tiled_llm
    chats = [chat_of(*parts) for parts in mllama.CHATS.values()]
    answers = llm.chat(chats, max_tokens=COUNT, stop_token_ids=())
    for answer, parts in zip(answers, mllama.CHATS.values(), strict=True):
        assert list(answer.tokens) == mllama.expected(tiled, llm, parts, COUNT)


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_preempted_chat_continues_with_its_tiles(
    host_bytes: int, tiled: Any, tiled_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swapped request retains its image, although no request runs and the cache is full."""
    llm, parts = tiled_llm, (picture(50, 50, 9), "so?")
    monkeypatch.setattr(llm._loop.scheduler.images, "max_bytes", 1)
    for name in ("check", "fits"):
        monkeypatch.setattr(llm._loop.scheduler.images, name, lambda *_: True)
    output = preempted(llm, parts, host_bytes, monkeypatch)
    assert output == mllama.expected(tiled, llm, parts, COUNT + 1)


def test_chunks_and_evicted_images_give_the_tokens_of_transformers(
    tiled: Any, tiled_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "CROSS_CACHE_BYTES", 0)
    monkeypatch.setattr(image_cache.ImageCache, "check", lambda *_: None)
    monkeypatch.setattr(image_cache.ImageCache, "fits", lambda *_: True)
    with LLM(tiled_folder, compute="exact", max_num_batched_tokens=5, **OPTIONS) as llm:
        for name in ("two_images", "adjacent", "text"):
            parts = mllama.CHATS[name]
            answer = llm.chat(chat_of(*parts), max_tokens=2, stop_token_ids=())
            assert list(answer.tokens) == mllama.expected(tiled, llm, parts, 2)
        assert llm.compiled.executable._images.num_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("strict", ["never", "always"])
def test_captured_steps_with_tiles_agree_with_prefill(
    strict: str, tiled: Any, tiled_folder: Path
) -> None:
    """Decode agrees with prefill. In strict arithmetic, a batch gives every chat its tokens."""
    with LLM(tiled_folder, max_seats=4, batch_invariant=strict, **OPTIONS) as llm:
        chats = [chat_of(*parts) for parts in mllama.CHATS.values()]
        sampling: dict[str, Any] = {"max_tokens": 6, "stop_token_ids": ()}
        for answer, chat in zip(llm.chat(chats, **sampling), chats, strict=True):
            if strict == "always":
                assert llm.chat(chat, **sampling).tokens == answer.tokens
        for parts in mllama.CHATS.values():
            prompt, images = llm._of_chat(chat_of(*parts))
            tokens, scores = scored(llm, prompt, images, 6)
            for at in (1, 5):
                _, again = scored(llm, (*prompt, *tokens[:at]), images, 1)
                assert abs(again[0][tokens[at]] - scores[at][tokens[at]]) < 0.2
