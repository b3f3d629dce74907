"""Quantized weights made of several stored tensors.

Knows no scheme and reads no files. A scheme gets a read function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import row_range, shown

if TYPE_CHECKING:
    from torch import Tensor

Read: TypeAlias = "Callable[[str, tuple[slice, ...]], Tensor]"
"""Reads stored tensors in part: name, and a slice per axis."""

WHOLE = slice(None)
_CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".kv_scale"),
    *(".k_zero_point", ".v_zero_point", ".q_zero_point"),
)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A stored tensor: shape, type and size."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class QuantizedTensor(ABC):
    """A weight ``[rows, columns]`` made of stored tensors.

    Attributes:
        shape: Rows and columns, or more leading axes for experts.
        label: Scheme in the file.
        names: Stored tensors.
        num_shares: Weight count in the stored tensors.
        runs_on_device: Whether the arithmetic runs on the device of read tensors, with equal bits.
    """

    runs_on_device: ClassVar[bool] = False
    shape: tuple[int, ...]
    label: str
    names: tuple[str, ...]
    num_shares: int = 1

    @abstractmethod
    def values(self, read: Read, start: int, stop: int) -> Tensor:
        """Return float32 values of rows ``[start, stop)``."""

    def slices(self, read: Read, where: tuple[slice, ...]) -> Tensor:
        """Return float values of a slice per axis."""
        rows, columns = where
        start, stop = row_range(rows, self.shape[0])
        return self.values(read, start, stop)[:, columns].contiguous()

    def stored_type(self, read: Read) -> str:
        """Return the label, which names the exact format, if any."""
        return self.label

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        """Return ggml's name for the exact format, and rows as its blocks, uint8."""
        raise AssertionError(f"{self.label} has no blocks")


@dataclass
class RawModel:
    """Stored tensors that a scheme takes module by module.

    Attributes:
        path: The folder, for messages.
        tensors: Stored tensors by name. A taken tensor is removed.
        read: Reads stored tensors.
        found: Quantized weights by name.
        notes: Facts for the user.
        metadata: Texts in the headers of the files.
        stored_names: Tensor names in the file, by name. Missing: equal names.
    """

    path: Path
    tensors: dict[str, RawTensor]
    read: Read
    found: dict[str, QuantizedTensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stored_names: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def names_of(self, module: str) -> tuple[str, ...]:
        """Return a module's names, in the model and in the file."""
        weight = f"{module}.weight"
        tensor = self.found[weight].names[0] if weight in self.found else weight
        stored = self.stored_names.get(tensor, tensor).rpartition(".")[0]
        return tuple(dict.fromkeys((module, stored)))

    def error(self, name: str, what: str, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tensor {shown(name)} {what}; allowed: {allowed}")

    def take(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> RawTensor:
        """Remove and return a tensor with this shape and an allowed type.

        Raises:
            CheckpointError: The tensor is missing, or has another shape or type.
        """
        if name not in self.tensors:
            raise self.error(name, "is missing", f"{' or '.join(dtypes)} {list(shape)}")
        tensor = self.tensors[name]
        if tensor.dtype not in dtypes or tensor.shape != shape:
            what = f"is {tensor.dtype} {list(tensor.shape)}"
            raise self.error(name, what, f"{' or '.join(dtypes)} {list(shape)}")
        return self.tensors.pop(name)

    def drop(self, *names: str) -> bool:
        """Remove tensors that describe activations; return whether any existed."""
        found = [self.tensors.pop(name, None) for name in names]
        return any(tensor is not None for tensor in found)

    def modules(self, suffix: str) -> list[str]:
        """Return modules with this tensor."""
        ending = f".{suffix}"
        return sorted(n.removesuffix(ending) for n in self.tensors if n.endswith(ending))

    def say_once(self, what: str) -> None:
        """Add a note about activations, unless it exists."""
        note = f"{self.path}: {what}; here they keep the configuration's format"
        if note not in self.notes:
            self.notes.append(note)

    def drop_cache_scales(self) -> None:
        """Remove scales of the KV cache, and note it. The cache keeps its own format."""
        scales = [name for name in self.tensors if name.endswith(_CACHE_SCALES)]
        if self.drop(*scales):
            self.notes.append(
                f"{self.path}: {len(scales)} scales of the KV cache are not used "
                f"({shown(scales[0])}); the cache keeps the configuration's format"
            )

    def add(self, module: str, weight: QuantizedTensor) -> None:
        """Add a weight.

        Raises:
            CheckpointError: The weight has no elements.
        """
        if 0 in weight.shape:
            what = f"is of a weight with shape {list(weight.shape)}"
            raise self.error(weight.names[0], what, "sizes of 1 and above")
        self.found[f"{module}.weight"] = weight


def setting(
    config: Mapping[str, object], key: str, allowed: tuple[object, ...], where: str, default: object
) -> object:
    """Return an allowed setting.

    Raises:
        CheckpointError: Another value.
    """
    value = config.get(key, default)
    if not any(value == each and type(value) is type(each) for each in allowed):
        names = ", ".join(str(each) for each in allowed)
        raise CheckpointError(f"{where}: quantization_config.{key} = {value!r}; allowed: {names}")
    return value


def read_finite(read: Read, name: str) -> Tensor:
    """Return a whole float tensor.

    Raises:
        CheckpointError: A value is inf or NaN.
    """
    return check_finite(name, read(name, ()).float())


def check_finite(name: str, numbers: Tensor) -> Tensor:
    """Return a tensor's values.

    Raises:
        CheckpointError: A value is inf or NaN.
    """
    if not bool(numbers.isfinite().all()):
        raise CheckpointError(f"tensor {name} has inf or NaN; allowed: finite values")
    return numbers
