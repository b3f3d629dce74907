"""Inner loops of code tiles, compiled for the CPU: a warp's decoding, fragments and sums."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.targets.cuda.kernels.test_coded import File
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul import gemv
from tilewright.compiler.targets.cuda.weights.coded import unpack_coded
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

MAIN = """
template <int F> void run() {
  const int lane = threadIdx.x, row_bytes = (STEP + x_padding<F>) * 2, g = lane >> 2, t = lane & 3;
  float acc[1][1][4] = {};
  multiply_coded<F, 1, 1, false>(acc, weight_offset<F>(lane), second_offset<F>(lane),
                                 8192 + x_offset<F>(lane, row_bytes), 8 * row_bytes);
  Product p = {};
  p.num_tokens = 8, p.num_rows = 16, p.num_tiles = 1, p.out_stride = 16;
  if (F == NVFP4) p.scale.rows = (double *)(shared + 16384);
  else p.scale.all = F == FP8 ? 1.0f : 64.0f;
  p.out = shared + 32768;
  finish<F>(p, 2 * t, 0, g, acc[0][0][0], acc[0][0][2]);
  finish<F>(p, 2 * t + 1, 0, g, acc[0][0][1], acc[0][0][3]);
  float again[1][4];
  std::memcpy(again, acc[0], sizeof(again));
  p.out = shared + 33280;
  finish_tile<F>(p, 2 * t, 0, g, again);
  p.out = shared + 33792, p.epilogue = ADD;
  finish_tile<F>(p, 2 * t, 0, g, acc[0]);
}
int main(int, char **argv) {
  const int format = argv[1][0] - '0';
  std::fread(shared, 1, sizeof(shared), stdin);
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane)
    lanes.emplace_back([=] {
      threadIdx.x = lane;
      format == Q40 ? run<Q40>() : format == Q80 ? run<Q80>() : format == FP8 ? run<FP8>()
                                                                             : run<NVFP4>();
    });
  for (auto &lane : lanes) lane.join();
  std::fwrite(shared + 32768, 1, 1536, stdout);
}
"""
NUMBERS = {"q40": 3, "q80": 4, "fp8": 5, "nvfp4": 7}
"""Formats in tiles.cuh."""

Warp = Callable[[str, bytes], bytes]


@pytest.fixture(scope="module")
def warp(tmp_path_factory: pytest.TempPathFactory) -> Warp:
    """Return a function that runs a warp on the bytes of shared memory."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    names, path = ("tiles.cuh", "arrange.cuh", "finish.cuh"), gemv.coded_source().path
    files = [Path(__file__).with_name("warp.h"), *(nvrtc.header_path(path, name) for name in names)]
    text = "\n".join(file.read_text() for file in files)
    source = tmp_path_factory.mktemp("warp") / "warp.cpp"
    source.write_text(re.sub(r'#include ".*|#pragma once', "", text) + MAIN)
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-w", str(source), "-o"]
    subprocess.run([*command, str(source.with_suffix(""))], check=True)

    def run(kind: str, data: bytes) -> bytes:
        program = [str(source.with_suffix("")), str(NUMBERS[kind])]
        return subprocess.run(program, input=data, capture_output=True, check=True).stdout

    return run


def check(packed: PackedWeight, warp: Warp) -> None:
    """Multiply a tile with eight tokens. The third result is added to zeros."""
    x = torch.randn(8, 128).bfloat16()
    padded = torch.zeros(8, 128 + gemv.x_padding(packed.kind), dtype=torch.bfloat16)
    padded[:, :128] = x
    parts = packed.data[0, 0], padded.view(torch.uint8).flatten()
    data = b"".join(bytes(part.numpy()).ljust(8192, b"\0") for part in parts)
    if packed.second_scales is not None:
        data += bytes(packed.second_scales.view(torch.uint8).numpy())
    results = torch.frombuffer(bytearray(warp(packed.kind, data)), dtype=torch.float32)
    stored, again, added = results.view(3, 8, 16)
    exact = x.double() @ unpack_coded(packed).double().T
    torch.testing.assert_close(stored.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(again, stored) and torch.equal(added, stored)


@pytest.mark.parametrize("kind", gemv.CODED)
def test_a_warp_multiplies_a_tile(kind: str, warp: Warp) -> None:
    check(File(kind, 16, 128).place(torch.device("cpu")), warp)


@pytest.mark.parametrize("first", [0, 120])
def test_a_warp_decodes_all_scales_of_nvfp4(first: int, warp: Warp) -> None:
    """Products of codes and scales are exact, otherwise the program ends."""
    packed = File("nvfp4", 16, 128).place(torch.device("cpu"))
    packed.data[0, 0, 1024:] = torch.arange(first, first + 128)
    check(replace(packed, second_scales=torch.ones(16, dtype=torch.float64)), warp)
