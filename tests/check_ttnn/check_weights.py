"""What an emitted file puts on each chip of a mock cluster from a folder of weights.

    python check_weights.py FILE BOARD FOLDER OUT SCRATCH

OUT: an .npz with the values of ``<weight>@<row of the mesh>.<column>``, columns that fill the last
tile cut off. All weights are then sent to the chips, as a run would. Runs in the Python that has
ttnn.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import mock_cluster
import numpy


def values(module, folder: Path) -> dict:
    """As the host has converted them; the mock keeps no memory of a chip's."""
    import torch
    from safetensors import safe_open

    names = dict(module.OUTSIDE)
    for layer in range(module.NUM_LAYERS):
        for name, spec in module.layer_weights(layer).items():
            names[module.LAYER.format(layer) + name] = spec
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys() & names.keys():
                pieces = module.host_pieces(opened.get_tensor(name), names[name])
                parts = [module.ttnn.get_device_tensors(piece) for piece in pieces]
                for chip, of_chip in enumerate(zip(*parts, strict=True)):
                    dense = [module.ttnn.to_torch(part).float() for part in of_chip]
                    whole = torch.cat([d.reshape(-1, d.shape[-1]) for d in dense], -1)
                    row, column = divmod(chip, module.MESH[1])
                    kept = whole[:, : names[name].columns]
                    found[f"{name}@{row}.{column}"] = kept.numpy()
    return found


if __name__ == "__main__":
    _, file, board, folder, out, scratch = sys.argv
    mock_cluster.use(board, Path(scratch))
    spec = importlib.util.spec_from_file_location("emitted", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["emitted"] = module
    spec.loader.exec_module(module)
    numpy.savez(out, **values(module, Path(folder)))
    mesh = module.open_mesh()
    outside, layers = module.convert_weights(Path(folder), mesh)
    assert len(layers) == module.NUM_LAYERS and outside["frequencies"].ndim == 1
