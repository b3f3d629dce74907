"""Image parts of chat messages: from OpenAI's content parts to pictures within limits.

`take_images` is the only location where a message's image becomes pixels.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tilewright.errors import allowed
from tilewright.images.decode import ImageError, ImageLimits, as_rgb, decode_image

if TYPE_CHECKING:
    from PIL.Image import Image

DETAILS = ("auto", "low", "high")
_ROLES = ("user", "tool")
_T = TypeVar("_T")

Fetch = Callable[[str, str], tuple[bytes, str | None]]
"""Returns the bytes and the MIME type of a URL without ``data:``. The second argument is the
location for errors.
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded image of a message: RGB pixels, ``detail``, and its location for errors."""

    image: Image
    detail: str
    where: str


def take_images(
    messages: Sequence[Mapping[str, Any]],
    limits: ImageLimits,
    make: Callable[[Picture], _T],
    *,
    fetch: Fetch | None = None,
    is_local: bool = False,
) -> tuple[list[dict[str, Any]], list[_T]]:
    """Return the messages with ``{"type": "image"}`` per image, and the images in order.

    ``make`` receives every picture, so only a single decoded image is in memory.

    Args:
        messages: The chat. ``content`` is a text or a list of parts.
        limits: The request's limits.
        make: Makes an image of the result from a picture.
        fetch: Reads URLs other than ``data:``. None: such URLs are refused.
        is_local: Accept ``{"type": "image", "image": ...}`` with a Pillow image or a path, as
            `tilewright.LLM` does.

    Raises:
        ImageError: An image is invalid, in a wrong location, or above the limit.
    """
    result: list[_T] = []
    chat = []
    for at, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(map(_is_image, content)):
            chat.append(dict(message))
            continue
        parts: list[Any] = []
        for index, item in enumerate(content):
            where = f"messages[{at}].content[{index}]"
            if not _is_image(item):
                parts.append(item)
                continue
            if message.get("role") not in _ROLES:
                role = message.get("role")
                raise ImageError(f"{where}: an image of role {role!r}; {allowed(_ROLES)}")
            if len(result) == limits.max_images:
                raise ImageError(
                    f"{where}: image {len(result) + 1}; allowed: up to {limits.max_images}",
                    "too_many_images",
                )
            result.append(make(_picture(item, limits, where, fetch, is_local=is_local)))
            parts.append({"type": "image"})
        chat.append({**message, "content": parts})
    return chat, result


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a chat has image parts."""
    contents = [message.get("content") for message in messages]
    return any(_is_image(item) for c in contents if isinstance(c, list) for item in c)


def _is_image(item: object) -> bool:
    return isinstance(item, Mapping) and item.get("type") in ("image", "image_url")


def _picture(
    item: Mapping[str, Any],
    limits: ImageLimits,
    where: str,
    fetch: Fetch | None,
    *,
    is_local: bool,
) -> Picture:
    if item["type"] == "image":
        if not is_local or "image" not in item:
            raise ImageError(f"{where}: content of type 'image'; allowed: text, image_url")
        return Picture(_local_image(item["image"], limits, where), "auto", where)
    value = item.get("image_url")
    value = {"url": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or not isinstance(value.get("url"), str):
        raise ImageError(
            f'{where}.image_url: no URL; allowed: {{"url": "data:image/png;base64,.."}}'
        )
    detail = value.get("detail") or "auto"
    if detail not in DETAILS:
        raise ImageError(f"{where}.image_url.detail: {str(detail)[:40]!r}; {allowed(DETAILS)}")
    where = f"{where}.image_url"
    data, mime_type = read_url(value["url"], limits, where, fetch)
    return Picture(decode_image(data, limits, where=where, mime_type=mime_type), detail, where)


def read_url(
    url: str, limits: ImageLimits, where: str, fetch: Fetch | None = None
) -> tuple[bytes, str | None]:
    """Return the bytes and a URL's MIME type.

    Raises:
        ImageError: The URL is not base64 data, or may not be fetched.
    """
    if not url.startswith("data:"):
        if fetch is not None:
            return fetch(url, where)
        raise ImageError(
            f"{where}: image URLs are not fetched; allowed: a data: URL", "unsupported"
        )
    head, comma, body = url[5:].partition(",")
    mime_type, _, coding = head.partition(";")
    if not comma or coding.strip().lower() != "base64":
        raise ImageError(f"{where}: {url[:40]!r}; allowed: data:image/png;base64,...")
    if len(body) > limits.max_bytes // 3 * 4 + 4:
        raise ImageError(f"{where}: {len(body)} characters; allowed: {limits.max_bytes} bytes")
    try:
        return base64.b64decode(body, validate=True), mime_type.strip().lower()
    except (binascii.Error, ValueError):
        raise ImageError(f"{where}: not base64; allowed: data:image/png;base64,...") from None


def _local_image(value: object, limits: ImageLimits, where: str) -> Image:
    """Return a Pillow image, or a path's image, as RGB."""
    if isinstance(value, str | Path):
        return decode_image(read_image_file(value, limits), limits, where=str(value))
    if not hasattr(value, "convert"):
        type_name = type(value).__name__
        raise ImageError(f"{where}.image: {type_name}; allowed: a Pillow image or a path")
    return as_rgb(value, limits, where)


def read_image_file(path: str | Path, limits: ImageLimits) -> bytes:
    """Return an image file's bytes.

    Raises:
        ImageError: It cannot be read or is too large.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(limits.max_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError(f"{str(path)[:200]}: {reason}; allowed: an image file") from None
    if len(data) > limits.max_bytes:
        raise ImageError(f"{path}: over {limits.max_bytes} bytes; allowed: a smaller file")
    return data
