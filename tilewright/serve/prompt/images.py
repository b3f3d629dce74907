"""Chat images in the API server: decoding in a worker, and token ids with placeholders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tilewright.images.decode import ImageError, ImageLimits
from tilewright.images.fetch import MediaHosts
from tilewright.images.parts import has_images, take_images
from tilewright.images.processor import PreparedImage
from tilewright.images.prompt import insert_images
from tilewright.images.squares import AnyProcessor
from tilewright.serve.prompt.prepare import TokenizedPrompt
from tilewright.serve.web.errors import ApiError, refuse, unsupported
from tilewright.serve.web.requests import ChatMessage

IMAGE_SECONDS = 10.0
"""Maximum time to fetch and decode the images of a request."""

InWorker = Callable[..., Any]
"""Runs a function with arguments in a worker thread. Awaitable."""


def chat_has_images(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a chat has image parts."""
    return has_images([{"content": message.content} for message in messages])


async def prepare_images(
    messages: Sequence[ChatMessage],
    processor: AnyProcessor | None,
    limits: ImageLimits,
    in_worker: InWorker,
    hosts: MediaHosts | None = None,
) -> tuple[list[ChatMessage], list[PreparedImage]]:
    """Return the messages with ``{"type": "image"}`` parts, and their images.

    ``hosts``: Http URL hosts. None: such URLs are refused.

    Raises:
        ApiError: 400 for a model without images, an invalid image, or slow decoding.
    """
    if processor is None:
        raise unsupported("messages", "this model and target take no images; allowed: text")
    listed = [{"role": m.role, "content": m.content} for m in messages]
    try:
        async with asyncio.timeout(IMAGE_SECONDS):
            fetch = None if hosts is None else hosts.fetcher()
            chat, images = await in_worker(
                take_images, listed, limits, processor.prepare, fetch=fetch
            )
    except ImageError as error:
        raise refuse(error, error.code, "messages") from None
    except TimeoutError:
        said = f"messages: images took longer than {IMAGE_SECONDS:g} s to decode"
        raise ApiError(400, "invalid_image", said, param="messages") from None
    contents = [message["content"] for message in chat]
    replaced = [
        msgspec.structs.replace(message, content=content)
        for message, content in zip(messages, contents, strict=True)
    ]
    return replaced, images


def with_images(
    prompt: TokenizedPrompt,
    images: Sequence[PreparedImage],
    processor: AnyProcessor,
) -> TokenizedPrompt:
    """Return a prompt with placeholders for all embeddings.

    Raises:
        ApiError: 400 if the template has not written a placeholder per image.
    """
    try:
        tokens, placed = insert_images(prompt.tokens, images, processor.image_token)
    except ImageError as error:
        raise refuse(error, error.code, "messages") from None
    return TokenizedPrompt(prompt.text, tokens, placed)
