"""Module lists in quantization_config: name patterns, and checks against the stored modules.

A module in a dense list must be dense. A module in a quantized list must be quantized.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import shown
from tilewright.models.checkpoints.quantized.base import RawModel

_DENSE_KEYS = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"),
    *("llm_int8_skip_modules", "skip_modules"),
)
_QUANTIZED_KEYS = (
    *("modules_to_convert", "modules_in_block_to_quantize", "quantized_layers"),
    "config_groups",
)
_MAX_PATTERN, _MAX_REPEATS, _MAX_CHOICES = 1000, 4, 4
_SPECIAL = re.compile(r"[*?+^$|()\[\]{}\\]")
_REPEAT = re.compile(r"(?<!\\)(?:[*+]|\{\d*,?\d*\})")
_CHOICE = re.compile(r"\(|(?<![(*+?])\?")
"""A group or an optional item, each with several ways to match."""
_CLASS = re.compile(r"[A-Z][A-Za-z0-9_]*")


class NamePatterns:
    """Patterns for module names.

    A plain pattern has whole components: ``mlp.gate`` matches ``layers.0.mlp.gate``, and
    not ``mlp.gate_proj``. A pattern with special characters is a wildcard for modelopt, and a
    regular expression at the start of a name otherwise. The prefix ``re:`` is optional.

    Raises:
        CheckpointError: A pattern is no text, too long, too complex, or no regular expression.
    """

    def __init__(self, patterns: Iterable[object], where: str, *, has_wildcards: bool = False):
        self._plain: set[str] = set()
        self._special: dict[str, re.Pattern[str]] = {}
        for pattern in patterns:
            if not isinstance(pattern, str) or not 1 <= len(pattern) <= _MAX_PATTERN:
                allowed = f"names and patterns of up to {_MAX_PATTERN} characters"
                raise CheckpointError(f"{where} has {str(pattern)[:40]!r}; allowed: {allowed}")
            body = pattern.removeprefix("re:")
            if body == pattern and not _SPECIAL.search(body):
                self._plain.add(body)
            elif has_wildcards:
                self._special[pattern] = re.compile(fnmatch.translate(re.sub(r"\*+", "*", body)))
            else:
                self._special[pattern] = _regular(body, where, is_marked=body != pattern)

    def find(self, names: Iterable[str]) -> str | None:
        """Return a pattern that matches any name, or None."""
        for name in names:
            for run in _runs(name) if self._plain else ():
                if run in self._plain:
                    return run
            for pattern, expression in self._special.items():
                if expression.match(name):
                    return pattern
        return None


def _regular(body: str, where: str, *, is_marked: bool) -> re.Pattern[str]:
    """Compile an expression without nested repeats, whose search takes little time."""
    plain = re.sub(r"\\.", "a", body)
    is_simple = len(_REPEAT.findall(plain)) <= _MAX_REPEATS and not re.search(r"\)[*+{]", plain)
    is_simple = is_simple and len(_CHOICE.findall(plain)) <= _MAX_CHOICES
    try:
        if is_simple:
            return re.compile(body if is_marked else rf"(?:{body})(?:(?<=\.)|(?=\.|$))")
    except (re.error, OverflowError, RecursionError):
        pass
    raise CheckpointError(
        f"{where} has the pattern {body[:60]!r}; "
        f"allowed: regular expressions with up to {_MAX_REPEATS} repeats, none of a group, "
        f"and up to {_MAX_CHOICES} groups"
    )


def _runs(name: str) -> Iterable[str]:
    """Return all runs in a dotted name."""
    names = name.split(".")[:32]
    for start in range(len(names)):
        run = names[start]
        yield run
        for component in names[start + 1 :]:
            run = f"{run}.{component}"
            yield run


def is_class(target: str) -> bool:
    """Return whether a target is a class name, for example ``Linear``."""
    return _CLASS.fullmatch(target) is not None


def check_selection(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Check the quantized modules against the lists in ``config``; note unlisted dense modules.

    Raises:
        CheckpointError: A list has another form, or contradicts a stored module.
    """
    coded = {name.rpartition(".")[0] for name in model.found if name.endswith(".weight")}
    dense = [module for module in model.modules("weight") if module not in coded]
    has_wildcards = config.get("quant_method") == "modelopt"
    skips = {
        key: NamePatterns(_flat(config, key, where), _key(where, key), has_wildcards=has_wildcards)
        for key in _DENSE_KEYS
        if config.get(key)
    }
    for key, patterns in skips.items():
        for module in sorted(coded):
            _refuse(model, module, key, patterns.find(model.names_of(module)), is_coded=True)
    kinds = {module.rpartition(".")[2] for module in coded}
    unlisted = [
        module
        for module in dense
        if len(model.tensors[f"{module}.weight"].shape) > 1
        and not any(patterns.find(model.names_of(module)) for patterns in skips.values())
    ]
    for key in _QUANTIZED_KEYS:
        targets = [target for target in _flat(config, key, where) if not is_class(str(target))]
        wanted = NamePatterns(targets, _key(where, key), has_wildcards=has_wildcards)
        for module in unlisted if targets else ():
            pattern = wanted.find(model.names_of(module))
            is_named = pattern is not None and not _SPECIAL.search(pattern)
            if is_named or module.rpartition(".")[2] in kinds:
                _refuse(model, module, key, pattern, is_coded=False)
    odd = [module for module in unlisted if module.rpartition(".")[2] in kinds]
    if odd:
        model.notes.append(
            f"{model.path}: {len(odd)} modules are dense and not listed as such in "
            f"quantization_config, for example {shown(odd[0])}; they are read as stored"
        )


def _refuse(model: RawModel, module: str, key: str, pattern: str | None, *, is_coded: bool) -> None:
    if pattern is None:
        return
    stored, other = ("quantized", "dense") if is_coded else ("dense", "quantized")
    what = f"is {stored}, but quantization_config.{key} has {pattern[:60]!r}"
    raise model.error(f"{module}.weight", what, f"a {other} tensor, or a list without it")


def _key(where: str, key: str) -> str:
    return f"{where}: quantization_config.{key}"


def _flat(config: Mapping[str, object], key: str, where: str) -> list[object]:
    """Return list entries without nesting, or an object's keys."""
    value = config.get(key)
    if value is None:
        return []
    if isinstance(value, Mapping):
        groups = [group for group in value.values() if isinstance(group, Mapping)]
        if key != "config_groups":
            return list(value)
        value = [group["targets"] for group in groups if "targets" in group]
    if not isinstance(value, list):
        raise CheckpointError(f"{_key(where, key)} = {str(value)[:40]!r}; allowed: a list of names")
    return [entry for item in value for entry in (item if isinstance(item, list) else [item])]
