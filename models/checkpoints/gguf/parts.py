"""GGUF files in parts: finds and checks all parts, and joins their tensor tables.

A part is named ``NAME-00002-of-00005.gguf``. Only the first part has the model's metadata.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.gguf.header import (
    GGUFHeader,
    GGUFTensor,
    header_of,
    read_header,
)
from tilewright.models.checkpoints.mapped_file import map_file

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GGUFParts:
    """A model in one or several GGUF files.

    Attributes:
        files: Paths, the first part first.
        headers: Header by file.
        tensors: Tensors from all files. `GGUFTensor.part` is an index into ``files``.
    """

    files: tuple[Path, ...]
    headers: tuple[GGUFHeader, ...]
    tensors: Mapping[str, GGUFTensor]

    @property
    def metadata(self) -> Mapping[str, object]:
        """The model's metadata."""
        return self.headers[0].metadata


def stem_of(path: Path) -> str:
    """Return the file name without its part number and ending."""
    match = _NAME.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


def is_later_part(path: Path) -> bool:
    """Return whether the folder has an earlier part, the first."""
    first = _first_part(path)
    return first != path and first.is_file()


def parts_of(path: Path) -> GGUFParts:
    """Read the header, or all headers if the file is a part.

    Raises:
        CheckpointError: A file is missing or corrupt, or the parts do not fit together.
    """
    first = _first_part(path)
    if not first.is_file():
        own = read_header(memoryview(map_file(path)), path)
        if own.metadata.get(_COUNT) is not None:
            raise _missing(first, _file_count(path))
        first = path
    header = header_of(first)
    count = header.metadata.get(_COUNT, 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise CheckpointError(f"{first}: {_COUNT} = {count!r}; allowed: a number of parts")
    if count <= 1:
        if first != path:
            raise CheckpointError(
                f"{path}: {first.name} is a whole file, not the first part; allowed: all parts "
                "of a single split"
            )
        return GGUFParts((first,), (header,), header.tensors)
    files = _part_files(first, count)
    others = [read_header(memoryview(map_file(file)), file) for file in files[1:]]
    headers = (header, *others)
    return GGUFParts(files, headers, _joined(files, headers))


def _first_part(path: Path) -> Path:
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["number"]) == 1:
        return path
    return path.with_name(f"{match['stem']}-00001-of-{match['count']}{path.suffix}")


def _file_count(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return 1 if match is None else int(match["count"])


def _missing(file: Path, count: int) -> CheckpointError:
    return CheckpointError(f"{file}: the file is missing; allowed: all {count} parts in one folder")


def _part_files(first: Path, count: int) -> tuple[Path, ...]:
    match = _NAME.fullmatch(first.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{first}: the first of {count} parts by its {_COUNT}, not by its name; "
            f"allowed: NAME-00001-of-{count:05}.gguf"
        )
    files = []
    for number in range(1, count + 1):
        file = first.with_name(f"{match['stem']}-{number:05}-of-{count:05}{first.suffix}")
        if not file.is_file():
            raise _missing(file, count)
        files.append(file)
    return tuple(files)


def _joined(files: tuple[Path, ...], headers: tuple[GGUFHeader, ...]) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for part, (file, header) in enumerate(zip(files, headers, strict=True)):
        expected = {_NUMBER: part, _COUNT: len(files), _TENSORS: headers[0].metadata.get(_TENSORS)}
        for key, value in expected.items():
            if header.metadata.get(key) != value:
                raise CheckpointError(
                    f"{file}: {key} = {header.metadata.get(key)!r}; allowed: {value!r}, as part "
                    f"{part + 1} of {len(files)} of {files[0].name}"
                )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{file}: tensor {name[:80]!r} is in {files[tensors[name].part].name} too; "
                    "allowed: parts of a single file"
                )
            tensors[name] = dataclasses.replace(tensor, part=part)
    wanted = headers[0].metadata.get(_TENSORS)
    if wanted != len(tensors):
        raise CheckpointError(
            f"{files[0]}: {_TENSORS} = {wanted!r}, but its {len(files)} parts have "
            f"{len(tensors)} tensors; allowed: parts of a single file"
        )
    return tensors
