"""Image files and parts of messages: limits before pixels, one line for each fault."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tilewright.images.decode import FORMATS, ImageError, ImageLimits, decode_image
from tilewright.images.parts import Picture, take_images

LIMITS = ImageLimits()


def encoded(
    kind: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB", **how: Any
) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, 77 if mode in ("L", "P", "I;16") else None).save(out, kind, **how)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header has this size, and hardly any data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        whole = name + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 6), (value, 0, 0)) for value in (200, 10)]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


@pytest.mark.parametrize("mime_type", FORMATS)
def test_decode_image_of_every_type_is_rgb(mime_type: str) -> None:
    image = decode_image(encoded(FORMATS[mime_type]), LIMITS, where="x", mime_type=mime_type)
    assert (image.mode, image.size) == ("RGB", (8, 6))


def test_decode_image_of_a_gif_returns_the_first_frame() -> None:
    image = decode_image(animated("GIF"), LIMITS, where="x", mime_type="image/gif")
    assert image.getpixel((0, 0)) == (200, 0, 0)


FAULTS: dict[str, tuple[bytes, str, str]] = {
    "bomb": (bomb(60_000, 60_000), "image/png", "over the pixel limit; allowed: up to 64000000"),
    "large_header": (bomb(9000, 9000), "image/png", "9000 x 9000 pixels; allowed: up to 64000000"),
    "strip": (
        bomb(1, 100_000),
        "image/png",
        "1 x 100000 pixels; allowed: an aspect ratio up to 200",
    ),
    "truncated": (encoded("JPEG", (99, 99))[:-300], "image/jpeg", "cannot be decoded"),
    "short_data": (bomb(800, 800), "image/png", "cannot be decoded"),
    "cmyk": (encoded("JPEG", mode="CMYK"), "image/jpeg", "color mode CMYK; allowed: 8-bit"),
    "16_bit": (encoded(mode="I;16"), "image/png", "color mode I;16; allowed: 8-bit"),
    "animated": (animated("WEBP"), "image/webp", "an animated image; allowed: a single frame"),
    "svg": (b"<svg xmlns='x'/>", "image/svg+xml", "type 'image/svg.xml'; allowed: image/png"),
    "wrong_type": (encoded("JPEG"), "image/png", "the data is not image/png"),
    "empty": (b"", "image/png", "the data is not image/png"),
    "noise": (encoded()[:40] + bytes(range(256)) * 40, "image/png", "cannot be decoded|not image"),
    "large": (bytes(LIMITS.max_bytes + 1), "image/png", "20971521 bytes; allowed: up to 20971520"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_decode_image_of_a_faulty_file_is_refused_in_a_line(name: str) -> None:
    data, mime_type, words = FAULTS[name]
    with pytest.raises(ImageError, match=words) as caught:
        decode_image(data, LIMITS, where="part", mime_type=mime_type)
    assert re.match(r"part: .*; allowed: ", str(caught.value)) and "\n" not in str(caught.value)


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(given: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": given}


def size_of(picture: Picture) -> tuple[object, str]:
    return picture.image.size, picture.detail


LOCAL_FAULTS = {
    name: FAULTS[name] for name in ("short_data", "cmyk", "16_bit", "animated", "strip")
}


@pytest.mark.parametrize("name", LOCAL_FAULTS)
def test_take_images_of_an_open_pillow_image_refuses_in_a_line(name: str) -> None:
    """Pillow reads the pixels of an opened file with its first use."""
    data, _, words = FAULTS[name]
    content = [{"type": "image", "image": Image.open(io.BytesIO(data))}]
    with pytest.raises(ImageError, match=words) as caught:
        take_images([{"role": "user", "content": content}], LIMITS, size_of, is_local=True)
    assert str(caught.value).startswith("messages[0].content[0]: ")
    assert "; allowed: " in str(caught.value) and "\n" not in str(caught.value)


def test_take_images_of_a_closed_pillow_image_refuses_in_a_line() -> None:
    """A TIFF file is read for its number of frames."""
    with Image.open(io.BytesIO(encoded("TIFF", (3, 4)))) as image:
        content = [{"type": "image", "image": image}]
    with pytest.raises(ImageError, match="cannot be decoded"):
        take_images([{"role": "user", "content": content}], LIMITS, size_of, is_local=True)


def test_take_images_replaces_parts_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.bmp").write_bytes(encoded("BMP", (3, 4)))
    text = {"type": "text", "text": "what?"}
    content = [
        *(part({"url": url(encoded()), "detail": "low"}), text),
        *({"type": "image", "image": tmp_path / "a.bmp"}, part(url(encoded()))),
        {"type": "image", "image": Image.new("L", (5, 5))},
    ]
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": content},
    ]
    given, found = take_images(chat, LIMITS, size_of, is_local=True)
    image = {"type": "image"}
    assert given == [chat[0], {"role": "user", "content": [image, text, image, image, image]}]
    assert found == [((8, 6), "low"), ((3, 4), "auto"), ((8, 6), "auto"), ((5, 5), "auto")]


@pytest.mark.parametrize(
    ("content", "role", "words", "code"),
    [
        ([part(url(encoded()))] * 5, "user", "image 5; allowed: up to 4", "too_many_images"),
        ([part(url(encoded()))], "system", "role 'system'; allowed: user, tool", "invalid_image"),
        ([part("https://a.b/c.png")], "user", "image URLs are not fetched", "unsupported"),
        ([part("data:image/png,abc")], "user", "allowed: data:image/png;base64", "invalid_image"),
        ([part("data:image/png;base64,*")], "user", "not base64", "invalid_image"),
        ([part({"url": url(encoded()), "detail": "x"})], "user", "detail: 'x'", "invalid_image"),
        ([part(3)], "user", "image_url: no URL", "invalid_image"),
        ([{"type": "image", "image": "a.png"}], "user", "content of type 'image'", "invalid_image"),
    ],
)
def test_take_images_refuses_in_a_line(content: Any, role: str, words: str, code: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        take_images([{"role": role, "content": content}], LIMITS, size_of)
    assert caught.value.code == code
