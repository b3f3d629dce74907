"""Groups of a compressed-tensors configuration: which modules have which scheme.

A module gets the group of the first target that matches: exact names, then regular expressions,
then classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import RawModel
from tilewright.models.checkpoints.quantized.selection import NamePatterns, is_class

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_ORDERS: Mapping[object, bool] = {
    **{None: False, False: False, "weight": False, "static": False},
    **{True: True, "group": True, "dynamic": True},
}
"""Values of ``actorder``, and whether ``weight_g_idx`` is stored."""
_MAX_SIZE = 1 << 20
SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
"""Shapes of a scale for the whole tensor."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The weights of a group.

    Attributes:
        where: Location in the configuration, for messages.
        strategy: What shares a scale. None: absent.
        group_size: Columns per scale. None: all columns, or absent.
        block: Rows and columns per scale, for the strategy ``block``.
        has_zeros: Whether zero points are stored. None: absent.
        has_order: Whether ``weight_g_idx`` is stored (act-order by groups).
    """

    where: str
    bits: int
    strategy: str | None
    group_size: int | None
    block: tuple[int, int] | None
    has_zeros: bool | None = None
    has_order: bool = False

    def check_parts(self, model: RawModel, module: str, *, has_order: bool = False) -> None:
        """Refuse a module without the zero points or the order of its scheme.

        Args:
            model: The stored tensors.
            module: Module name.
            has_order: Whether other modules of the group have an order.

        Raises:
            CheckpointError: A tensor is missing.
        """
        for suffix, is_needed, allowed in (
            ("weight_zero_point", self.has_zeros, f"the tensor, which {self.where} names"),
            ("weight_g_idx", self.has_order, f"the tensor, which {self.where} names"),
            ("weight_g_idx", has_order, f"the tensor in all modules of {self.where}, or in none"),
        ):
            name = f"{module}.{suffix}"
            if is_needed and name not in model.tensors:
                raise model.error(name, "is missing", allowed)

    def check_scale(self, model: RawModel, scale: str, rows: int) -> None:
        """Refuse scales of another strategy, for a weight with ``rows`` outputs.

        Raises:
            CheckpointError: A tensor has scales per channel, or channels a scale per tensor.
        """
        shape = model.tensors[scale].shape if scale in model.tensors else None
        if shape is None or self.strategy not in ("tensor", "channel"):
            return
        is_scalar = shape in SCALAR_SHAPES
        if is_scalar != (self.strategy == "tensor") and not (is_scalar and rows == 1):
            what = f"has shape {list(shape)} with strategy {self.strategy} in {self.where}"
            wanted = "a number" if self.strategy == "tensor" else f"[{rows}, 1]"
            raise model.error(scale, what, wanted)

    def scale_shape(self, model: RawModel, scale: str, rows: int, groups: int) -> tuple[int, ...]:
        """Return the shape for a weight's scales: as stored for a common scale, else rows and
        groups.
        """
        stored = model.tensors[scale].shape if scale in model.tensors else (rows, groups)
        is_common = self.strategy in (None, "tensor") or (self.strategy, rows) == ("channel", 1)
        return stored if is_common and stored in SCALAR_SHAPES else (rows, groups)

    def columns_per_scale(self, model: RawModel, scale: str, columns: int) -> int:
        """Return the columns with a common scale, for the scales ``[rows, groups]``.

        Raises:
            CheckpointError: Several groups without a size, or another number of groups.
        """
        shape = model.tensors[scale].shape if scale in model.tensors else ()
        groups = shape[1] if len(shape) == 2 else 1
        size = self.group_size
        if size is None and groups > 1:
            raise model.error(scale, f"has {groups} groups", f"group_size in {self.where}")
        own = columns if size is None else size
        if columns % own:
            raise model.error(scale, f"has groups of {own} for {columns} columns", "equal groups")
        return own


class Schemes:
    """All groups of a configuration.

    Raises:
        CheckpointError: A group does not describe weights.
    """

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(
                f"{where}: quantization_config.config_groups = {repr(groups)[:40]}; "
                "allowed: an object"
            )
        self.where = f"{where}: quantization_config.config_groups"
        self._exact: dict[str, Scheme] = {}
        self._patterns: dict[str, tuple[NamePatterns, Scheme]] = {}
        self._class: Scheme | None = None
        for name, group in groups.items():
            prefix = f"{self.where}.{str(name)[:60]}"
            scheme = _scheme(group, f"{prefix}.weights")
            targets = group.get("targets", ["Linear"]) if isinstance(group, Mapping) else None
            if not isinstance(targets, list):
                raise CheckpointError(f"{prefix}.targets = {repr(targets)[:40]}; allowed: a list")
            for target in targets:
                self._add(target, scheme, prefix)

    def _add(self, target: object, scheme: Scheme, prefix: str) -> None:
        if isinstance(target, str) and target.startswith("re:"):
            self._patterns[target] = NamePatterns([target], f"{prefix}.targets"), scheme
        elif isinstance(target, str) and is_class(target):
            self._class = scheme if self._class is None or target == "Linear" else self._class
        elif isinstance(target, str):
            self._exact[target] = scheme
        else:
            raise CheckpointError(f"{prefix}.targets has {str(target)[:40]!r}; allowed: text")

    def of(self, model: RawModel, module: str, tensor: str) -> Scheme:
        """Return a module's scheme.

        Raises:
            CheckpointError: No group has the module.
        """
        names = model.names_of(module)
        for name in names:
            if name in self._exact:
                return self._exact[name]
        for target in sorted(self._patterns):
            patterns, scheme = self._patterns[target]
            if patterns.find(names):
                return scheme
        if self._class is None:
            raise model.error(tensor, "is quantized, but no target names it", self.where)
        return self._class


def _scheme(group: object, where: str) -> Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    weights = weights if isinstance(weights, Mapping) else {}
    bits = weights.get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise CheckpointError(f"{where}.num_bits = {repr(bits)[:40]}; allowed: 1 to 8")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is not None and strategy not in _STRATEGIES:
        raise CheckpointError(
            f"{where}.strategy = {str(strategy)[:40]!r}; allowed: {', '.join(_STRATEGIES)}"
        )
    if size is not None and (type(size) is not int or not (size == -1 or 1 <= size <= _MAX_SIZE)):
        raise CheckpointError(f"{where}.group_size = {repr(size)[:40]}; allowed: -1 or above 0")
    if strategy in ("group", "tensor_group") and (size is None or size == -1):
        raise CheckpointError(f"{where}.group_size is missing; allowed: columns in a group")
    if strategy not in ("group", "tensor_group", None) and size not in (None, -1):
        raise CheckpointError(
            f"{where}.group_size = {size} with strategy {strategy}; allowed: strategy group"
        )
    block = _block(weights.get("block_structure"), where)
    if (strategy == "block") != (block is not None):
        raise CheckpointError(
            f"{where}.block_structure = {list(block) if block else None} with strategy {strategy}; "
            "allowed: two sizes with strategy block only"
        )
    symmetric = weights.get("symmetric")
    if symmetric not in (True, False, None):
        raise CheckpointError(f"{where}.symmetric = {repr(symmetric)[:40]}; allowed: true, false")
    has_zeros = None if symmetric is None else not symmetric
    size = None if size == -1 else size
    return Scheme(where, bits, strategy, size, block, has_zeros, _has_order(weights, where))


def _has_order(weights: Mapping[str, object], where: str) -> bool:
    """Return whether the modules have an order of their groups."""
    order = weights.get("actorder")
    key = order.lower() if isinstance(order, str) else order
    if not isinstance(key, str | bool | None) or key not in _ORDERS:
        raise CheckpointError(f"{where}.actorder = {str(order)[:40]!r}; allowed: group, weight")
    return _ORDERS[key]


def _block(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value
    if isinstance(value, str):
        sizes = [int(size) if size.isdecimal() else size for size in value[:20].split("x")]
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and 1 <= size <= _MAX_SIZE for size in sizes)
    ):
        raise CheckpointError(
            f"{where}.block_structure = {str(value)[:40]!r}; allowed: rows and columns"
        )
    return sizes[0], sizes[1]
