"""The quantization of a Hugging Face folder: finds the scheme and takes its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.alternating import read_mxfp4
from tilewright.models.checkpoints.quantized.auto_round import read_auto_round
from tilewright.models.checkpoints.quantized.awq import read_awq
from tilewright.models.checkpoints.quantized.base import RawModel
from tilewright.models.checkpoints.quantized.bitsandbytes import read_bitsandbytes
from tilewright.models.checkpoints.quantized.compressed import read_compressed
from tilewright.models.checkpoints.quantized.config import SIDE_FILES, quantization_of
from tilewright.models.checkpoints.quantized.float4 import read_modelopt
from tilewright.models.checkpoints.quantized.float8 import read_fp8
from tilewright.models.checkpoints.quantized.gptq import read_gptq
from tilewright.models.checkpoints.quantized.mlx import read_mlx
from tilewright.models.checkpoints.quantized.selection import check_selection
from tilewright.models.checkpoints.quantized.torchao import read_torchao

_READERS: Mapping[str, Callable[[Mapping[str, object], str, RawModel], None]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mlx": read_mlx,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "torchao": read_torchao,
}


def take_quantized(values: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take every quantized module of ``model``, as ``config.json`` at ``where`` describes.

    Raises:
        CheckpointError: An unknown method, or tensors that do not fit it.
    """
    config = quantization_of(values, where)
    if config is None:
        return
    model.drop_cache_scales()
    _READERS[str(config["quant_method"])](config, where, model)
    check_selection(config, where, model)
    if not model.found:
        raise CheckpointError(
            f"{where}: quantization_config.quant_method = {config['quant_method']!r}, but no "
            "tensor is quantized; allowed: weights of that method, or no quantization_config, "
            f"{', '.join(SIDE_FILES)}"
        )
