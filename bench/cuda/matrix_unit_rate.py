"""How many multiply-adds a second the model of Wormhole's matrix unit makes on this machine.

``python -m bench.cuda.matrix_unit_rate [cpu|cuda]`` prints a table. Knows no model and no file.
"""

from __future__ import annotations

import sys
import time

import torch

from tilewright.compiler.targets.tenstorrent.matrix_unit import MatmulSettings, matmul

FIDELITIES = ("lofi", "hifi2fp16", "hifi2", "hifi3", "hifi4")
SIZES = ((1, 576, 1536), (1, 576, 49152), (32, 576, 1536), (512, 576, 1536), (512, 1536, 576))


def rate(size: tuple[int, int, int], settings: MatmulSettings, device: torch.device) -> float:
    """Multiply-adds a second of ``[M, K] x [K, N]``: the fastest of the runs of half a second."""
    num_rows, num_k, num_n = size
    act = torch.randn(num_rows, num_k, device=device).bfloat16()
    weight = torch.randn(num_k, num_n, device=device).bfloat16()
    matmul(act, weight, settings)
    fastest, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        start = time.perf_counter()
        matmul(act, weight, settings)
        if device.type == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return num_rows * num_k * num_n / fastest


def main() -> None:
    """Print a line a fidelity and size, with K blocks of 64 and bf16 outputs."""
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    print(f"{device}, {torch.get_num_threads()} threads; 1e9 multiply-adds a second")
    for fidelity in FIDELITIES:
        settings = MatmulSettings.of(fidelity, k_block=64, out_format="bf16")
        for size in SIZES:
            print(f"{fidelity:10} {size!s:16} {rate(size, settings, device) / 1e9:8.2f}")


if __name__ == "__main__":
    main()
