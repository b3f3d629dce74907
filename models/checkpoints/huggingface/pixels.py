"""Common pixel preprocessing of all image processors."""

from __future__ import annotations

import math

from tilewright.models.checkpoints.spelling.keys import Keys

_FACTOR = 1 / 255


def check_pixels(own: Keys) -> None:
    """Check for resized, scaled (0 to 1) and normalized images.

    Raises:
        CheckpointError: A key has another value.
    """
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if own.get(key) not in (None, True):
            raise own.error(key, own.get(key), "allowed: true")
    factor = own.get("rescale_factor")
    if factor is None or (
        isinstance(factor, float) and math.isclose(factor, _FACTOR, rel_tol=1e-5)
    ):
        return
    raise own.error("rescale_factor", factor, f"allowed: {_FACTOR}, which is 1/255")
