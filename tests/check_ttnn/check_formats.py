"""What ttnn's host conversion makes of tensors: the values it packs, and the bytes of its tiles.

    python check_formats.py IN OUT SCRATCH

IN: an .npz of float32 matrices. OUT: an .npz with, for each matrix and each of bfp8 and bfp4, the
values that come back. Runs in the Python that has ttnn and knows nothing of Tilewright.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mock_cluster
import numpy


def convert(matrices) -> dict:
    import torch
    import ttnn

    dtypes = {"bfp8": ttnn.bfloat8_b, "bfp4": ttnn.bfloat4_b}
    found = {}
    for name, matrix in matrices.items():
        for format_name, dtype in dtypes.items():
            packed = ttnn.from_torch(torch.from_numpy(matrix), dtype=dtype, layout=ttnn.TILE_LAYOUT)
            found[f"{name}.{format_name}"] = ttnn.to_torch(packed).float().numpy()
    return found


if __name__ == "__main__":
    _, given, made, scratch = sys.argv
    mock_cluster.use("n150", Path(scratch))
    numpy.savez(made, **convert(numpy.load(given)))
