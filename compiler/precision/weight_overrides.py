"""The ``weight_dtype_overrides`` file from tt-xla: weight formats by globs on parameter names.

The file has no fidelity, cache or activation. A later key wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import mode
from typing import TYPE_CHECKING

from tilewright.compiler.precision.fragment import Fragment, LayerRule, read_rule
from tilewright.errors import ConfigError, allowed

if TYPE_CHECKING:
    from tilewright.compiler.precision.hits import GroupedModule
    from tilewright.compiler.precision.resolve import ResolvedPrecision

DTYPES = {"bfp_bf4": "bfp4", "bfp_bf8": "bfp8", "bf16": "bf16"}
DEFAULT = "default"
_OF_DEFAULT = ("ff1_3", "ff2", "wqkv", "wo", "lm_head")
_LAYER = "model.layers.0"
_GROUPS = {
    **{f"{_LAYER}.self_attn.{name}_proj.weight": "wqkv" for name in "qkv"},
    f"{_LAYER}.self_attn.o_proj.weight": "wo",
    f"{_LAYER}.mlp.gate_proj.weight": "ff1_3",
    f"{_LAYER}.mlp.up_proj.weight": "ff1_3",
    f"{_LAYER}.mlp.down_proj.weight": "ff2",
    f"{_LAYER}.mlp.experts.gate_up_proj": "experts_ff1_3",
    f"{_LAYER}.mlp.experts.down_proj": "experts_ff2",
    f"{_LAYER}.linear_attn.in_proj_qkv.weight": "delta_in",
    f"{_LAYER}.linear_attn.in_proj_z.weight": "delta_in",
    f"{_LAYER}.linear_attn.out_proj.weight": "delta_out",
    "lm_head.weight": "lm_head",
}
"""Tensor groups by the vendor's parameter names, in layer 0."""


def is_weight_overrides(raw: object) -> bool:
    """Return whether JSON is a weight override file: a string, or a map to strings."""
    if isinstance(raw, str):
        return True
    return isinstance(raw, dict) and bool(raw) and all(isinstance(v, str) for v in raw.values())


def read_weight_overrides(raw: str | Mapping[str, str], *, source: str) -> Fragment:
    """Return the formats in a file. A plain string is the default.

    Raises:
        ConfigError: for an unknown dtype, or a glob that matches no weight.
    """
    entries = {DEFAULT: raw} if isinstance(raw, str) else dict(raw)
    tensors: dict[str, str] = {}
    rules: list[LayerRule] = []
    for key, dtype in entries.items():
        if dtype not in DTYPES:
            raise ConfigError(f"{source}: {key}: {dtype[:60]!r}; {allowed(DTYPES)}")
        if key == DEFAULT:
            tensors = dict.fromkeys(_OF_DEFAULT, DTYPES[dtype])
            rules = [rule for rule in rules if ".experts." in rule.selector]
            continue
        rules += _rules(key, DTYPES[dtype], source=source)
    return Fragment(source=source, settings=tensors, rules=tuple(rules))


def _rules(key: str, format_: str, *, source: str) -> list[LayerRule]:
    path = key.removeprefix("model.") if key.startswith("model.model.") else key
    pattern = re.sub(r"layers\.\d+", "layers.0", path)
    names = [name for name in _GROUPS if fnmatchcase(name, pattern)]
    # A broad glob means the dense weights, unless the glob names experts or DeltaNet.
    dense = [name for name in names if ".experts." not in name and "linear_attn" not in name]
    names = dense or names
    if not names:
        raise ConfigError(f"{source}: {key[:80]!r} matches no weight; allowed: {_allowed()}")
    layer = re.search(r"layers\.(\d+|\*|\?|\[[^]]*\])", path)
    index = layer[1] if layer else "*"
    result = {}
    for name in names:
        module = name.removesuffix(".weight").replace("layers.0", f"layers.{index}")
        modules = [module]
        if module.endswith("gate_up_proj"):
            stem = module.removesuffix("gate_up_proj")
            modules = [f"{stem}gate_proj", f"{stem}up_proj"]
        for item in modules:
            entry = {"precision": {_GROUPS[name]: format_}}
            result[item] = read_rule(item, entry, where=source)
    return list(result.values())


def _allowed() -> str:
    shown = [name.replace("layers.0", "layers.*") for name in _GROUPS]
    return f"{', '.join(shown[:5])}, ..."


def weight_overrides(
    precision: ResolvedPrecision, modules: Sequence[GroupedModule]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the file's entries, and the settings that the file cannot express.

    Raises:
        ConfigError: for a weight format without a vendor dtype.
    """
    dtypes = {format_: dtype for dtype, format_ in DTYPES.items()}
    result: dict[str, str] = {}
    groups = set(_GROUPS.values())
    for module in modules:
        if module.group not in groups:
            continue
        format_ = precision.format(module.group, layer=module.layer, fqn=module.fqn)
        if format_ not in dtypes:
            raise ConfigError(f"{module.fqn}: {format_} has no dtype there; {allowed(DTYPES)}")
        suffix = "" if ".experts." in module.fqn else ".weight"
        name = re.sub(r"experts\.(gate|up)_proj$", "experts.gate_up_proj", module.fqn)
        result[f"{name}{suffix}"] = dtypes[format_]
    default = mode(result.values())
    entries = {DEFAULT: default}
    families: dict[str, dict[str, str]] = {}
    for name, dtype in result.items():
        families.setdefault(re.sub(r"layers\.\d+", "layers.*", name), {})[name] = dtype
    for family, members in families.items():
        if set(members.values()) == {default} and family.endswith(".weight"):
            continue
        if len(set(members.values())) == 1:
            entries[family] = next(iter(members.values()))
        else:
            entries |= members
    return entries, ("fidelity", "kv_cache", "activation", "embedding", "router")
