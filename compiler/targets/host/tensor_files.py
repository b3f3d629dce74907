"""A program's tensors on disk, in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tilewright.errors import NoRoomError, one_line
from tilewright.utils.files import mode_of_new


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a new safetensors file.

    Raises:
        NoRoomError: where the folder cannot be written.
    """
    try:
        save_file(dict(tensors), path)
        path.chmod(mode_of_new(0o666))  # the library makes files that only their owner can read
    except (OSError, SafetensorError) as error:
        raise NoRoomError(
            f"{path.parent}: the weights cannot be written ({one_line(error)}); "
            "allowed: a folder with room for them"
        ) from None
