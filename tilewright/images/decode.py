"""Image file decoding with Pillow. Limits are checked from the header, before pixels.

EXIF rotation is not applied, and alpha is dropped, as in the models' own processors.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.errors import ConfigError, RequestError, allowed, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
"""Pillow's format by MIME type."""

_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "La", "RGBa")


class ImageError(RequestError):
    """An image that cannot be used. ``code`` is the HTTP API's error code."""

    def __init__(self, message: str, code: str = "invalid_image") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits for a request's images.

    Attributes:
        max_images: Maximum image count. 0: no images.
        max_bytes: Maximum size of an encoded image.
        max_pixels: Maximum number of decoded pixels of an image.
        max_aspect: Maximum ratio of the longer to the shorter side.
    """

    max_images: int = 4
    max_bytes: int = 20 << 20
    max_pixels: int = 64_000_000
    max_aspect: int = 200


def import_pillow() -> None:
    """Check for Pillow.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "images: Pillow is not installed; allowed: pip install -e '.[vision]' in the clone"
        ) from None


def decode_image(
    data: bytes, limits: ImageLimits, *, where: str, mime_type: str | None = None
) -> Image:
    """Return an image file as RGB. An animated GIF gives its first frame.

    Args:
        data: File contents.
        limits: Request limits.
        where: Image's location, for errors.
        mime_type: Expected type. None: any supported type.

    Raises:
        ImageError: The file is truncated, too large, or of an unsupported type.
    """
    import_pillow()
    import PIL.Image

    if len(data) > limits.max_bytes:
        raise ImageError(f"{where}: {len(data)} bytes; allowed: up to {limits.max_bytes}")
    if mime_type is not None and mime_type not in FORMATS:
        raise ImageError(f"{where}: type {mime_type[:80]!r}; {allowed(FORMATS)}")
    names = list(FORMATS.values()) if mime_type is None else [FORMATS[mime_type]]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = PIL.Image.open(io.BytesIO(data), formats=names)
            return as_rgb(image, limits, where)
    except ImageError:
        raise
    except PIL.UnidentifiedImageError:
        name = "an image" if mime_type is None else mime_type
        raise ImageError(f"{where}: the data is not {name}; {allowed(FORMATS)}") from None
    except PIL.Image.DecompressionBombError:
        raise ImageError(
            f"{where}: over the pixel limit; allowed: up to {limits.max_pixels} pixels"
        ) from None
    # A damaged file can raise any exception of a decoder.
    except Exception as error:
        raise _damaged(where, error) from None


def as_rgb(image: Any, limits: ImageLimits, where: str) -> Image:
    """Return a Pillow image as RGB. Its pixels may still be in its file.

    Raises:
        ImageError: It is above a limit, of an unsupported mode, or cannot be decoded.
    """
    check_size(image, limits, where)
    try:
        _check_mode(image, where)  # reads a TIFF file
        result: Image = image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:
        raise _damaged(where, error) from None
    return result


def _damaged(where: str, error: Exception) -> ImageError:
    return ImageError(f"{where}: cannot be decoded ({one_line(error)}); allowed: a whole file")


def check_size(image: Image, limits: ImageLimits, where: str) -> None:
    """Check width and height, which a header has.

    Raises:
        ImageError: The image is empty, has over the pixel limit or is too narrow.
    """
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{where}: {width} x {height} pixels; allowed: 1 x 1 or more")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"{where}: {width} x {height} pixels; allowed: up to {limits.max_pixels} pixels"
        )
    if max(width, height) > limits.max_aspect * min(width, height):
        raise ImageError(
            f"{where}: {width} x {height} pixels; allowed: an aspect ratio up to "
            f"{limits.max_aspect}"
        )


def _check_mode(image: Image, where: str) -> None:
    if image.mode not in _MODES:
        raise ImageError(f"{where}: color mode {image.mode}; allowed: 8-bit grey, palette or RGB")
    if image.format != "GIF" and getattr(image, "n_frames", 1) > 1:
        raise ImageError(f"{where}: an animated image; allowed: a single frame, or a GIF")
