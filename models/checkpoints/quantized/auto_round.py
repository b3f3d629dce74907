"""AutoRound weights: the tensors of GPTQ or AWQ, under settings of their own."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import shown
from tilewright.models.checkpoints.quantized.awq import read_awq
from tilewright.models.checkpoints.quantized.base import RawModel, setting
from tilewright.models.checkpoints.quantized.gptq import read_gptq

_ZEROS_OF: Mapping[object, str] = {
    "auto_round": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_gptq:exllamav2": "gptq",
    "auto_round:auto_awq": "awq",
}
"""Packing formats, and the scheme with the same tensors."""
_SIZES = ("bits", "group_size", "sym", "data_type")
_DENSE_BITS = 16


def read_auto_round(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    packing = setting(config, "packing_format", tuple(_ZEROS_OF), where, None)
    setting(config, "data_type", ("int", None), where, None)
    _check_modules(config, where)
    act_bits = config.get("act_bits", _DENSE_BITS)
    if isinstance(act_bits, int) and act_bits < _DENSE_BITS:
        model.say_once("activations are quantized in other engines")
    sizes = {key: config[key] for key in ("bits", "group_size") if key in config}
    scheme = _ZEROS_OF[packing]
    if scheme == "awq":
        return read_awq(sizes, where, model)
    symmetric = config.get("sym", True)
    read_gptq({**sizes, "sym": symmetric, "checkpoint_format": scheme}, where, model)


def _check_modules(config: Mapping[str, object], where: str) -> None:
    """Refuse modules with other settings. Dense modules are allowed.

    Raises:
        CheckpointError: A module has other bits, another group size or other zeros.
    """
    modules = config.get("extra_config")
    for module, own in modules.items() if isinstance(modules, Mapping) else ():
        settings = own if isinstance(own, Mapping) else {}
        bits = settings.get("bits")
        if isinstance(bits, int) and bits >= _DENSE_BITS:
            continue
        for key in _SIZES:
            common = config.get(key)
            if settings.get(key, common) != common:
                raise CheckpointError(
                    f"{where}: quantization_config.extra_config.{shown(module)}.{key} = "
                    f"{repr(settings[key])[:40]}; allowed: {str(common)[:40]}, as all modules"
                )
