"""Writer for calibrated folders: a file for each segment, for resumption."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilewright.errors import ConfigError, NoRoomError
from tilewright.models.checkpoints.calibrated.checkpoint import part_name
from tilewright.models.checkpoints.calibrated.manifest import (
    MANIFEST,
    PARTIAL,
    CalibrationFacts,
    CalibrationManifest,
    StoredTensor,
    config_values,
    manifest_json,
    read_partial,
)
from tilewright.models.config import ModelConfig
from tilewright.utils.files import check_fresh, mode_of_new, replace_file

NORMS = "tuned norms"
"""A segment of norm weights. Its file name sorts after layer files."""
_CODED = "coded"
"""The metadata key. safetensors writes several keys in random order."""


class StoredCodes(Protocol):
    """Tensor rows as bytes; see `compiler.calibration.CodedMatrix`."""

    @property
    def name(self) -> str: ...
    @property
    def first(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def axis(self) -> str: ...
    @property
    def data(self) -> Tensor: ...


class CalibrationWriter:
    """A calibrated folder under construction.

    ``settings`` identify the calibration: resumption needs equal settings.

    Raises:
        ConfigError: for a folder with files or an unfinished calibration with different settings.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._folder, self._shapes = folder, shapes
        plain = json.loads(json.dumps(settings))
        before = read_partial(folder)
        if before is None:
            check_fresh(folder)
            self._guard(lambda: folder.mkdir(parents=True, exist_ok=True))
            self._guard(lambda: replace_file(folder / PARTIAL, json.dumps(plain).encode()))
        elif before != plain:
            changed = [key for key in plain if before.get(key) != plain[key]]
            raise ConfigError(
                f"{folder}: unfinished, with different {', '.join(changed) or 'settings'};"
                " allowed: the same command, or a new folder"
            )
        for rest in folder.glob("*.writing"):
            rest.unlink(missing_ok=True)
        self.is_resumed = before is not None

    def has(self, segment: str) -> bool:
        """Return whether a segment's file is complete."""
        path = self._folder / _file(segment)
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt"):
                return True
        except (SafetensorError, OSError):
            return False

    def write(
        self, segment: str, matrices: Iterable[StoredCodes], floats: Mapping[str, Tensor]
    ) -> None:
        """Write a segment's file atomically.

        Raises:
            NoRoomError: when it cannot be written.
        """
        tensors = {name: tensor.contiguous() for name, tensor in floats.items()}
        facts = {}
        for each in matrices:
            key = part_name(each.name, (each.first, each.first + each.num_rows))
            tensors[key] = each.data.contiguous()
            facts[key] = f"{each.format}/{each.axis}"
        path = self._folder / _file(segment)
        partial = path.with_suffix(".writing")

        def put() -> None:
            save_file(tensors, partial, metadata={_CODED: json.dumps(facts)})
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.chmod(mode_of_new(0o666))
            os.replace(partial, path)

        try:
            self._guard(put)
        finally:
            partial.unlink(missing_ok=True)

    def finish(
        self,
        facts: CalibrationFacts,
        config: ModelConfig,
        notes: tuple[str, ...],
        *,
        is_last: bool = True,
    ) -> None:
        """Write the manifest of a complete folder. ``is_last``: the calibration ends here.

        Tuned norm weights replace the norm weights in layer files.
        """
        tensors: dict[str, StoredTensor] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                formats = json.loads((file.metadata() or {}).get(_CODED, "{}"))
                for key in file.keys():  # noqa: SIM118
                    self._list(tensors, key, formats.get(key), path.name, file)
        is_tied = config.tie_embeddings and "lm_head.weight" not in tensors
        config = dataclasses.replace(config, tie_embeddings=is_tied)
        manifest = CalibrationManifest(facts, config_values(config), tensors, notes)
        self._guard(lambda: replace_file(self._folder / MANIFEST, manifest_json(manifest)))
        if is_last:
            (self._folder / PARTIAL).unlink(missing_ok=True)

    def _list(
        self, tensors: dict[str, StoredTensor], key: str, coded: str | None, name: str, file: Any
    ) -> None:
        if coded is None:
            tensor = file.get_slice(key)
            shape = tuple(tensor.get_shape())
            tensors[key] = StoredTensor(shape, str(tensor.get_dtype()), name)
            return
        tensor_name, _, rows = key.rpartition(":")
        first, _, last = rows.partition("-")
        format_, _, axis = coded.partition("/")
        before = tensors.get(tensor_name)
        parts = (*(before.parts if before else ()), (int(first), int(last)))
        shape = self._shapes[tensor_name]
        tensors[tensor_name] = StoredTensor(shape, format_, name, axis, tuple(sorted(parts)))

    def _guard(self, write: Any) -> None:
        try:
            write()
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise NoRoomError(
                f"{self._folder}: cannot be written ({reason}); allowed: a folder with room for "
                "it, then the same command again"
            ) from None


def _file(segment: str) -> str:
    """Return a segment's file name. Names sort in segment order."""
    if segment == NORMS:
        return "tuned-norms.safetensors"
    kind, _, number = segment.partition(" ")
    return f"{kind}-{int(number):05d}.safetensors" if number else f"{kind}.safetensors"
