"""Kernel benchmark for CUDA: ``python -m bench kernels`` prints microseconds a launch.

A case is a kernel family with model sizes. Its variants are kernels for the same result.
A CUDA graph captures launches over operands larger than the L2 cache. Excludes whole models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import keeper
from bench.cuda.expert_kernels import biased_experts, expert_layer, random_experts
from bench.cuda.variant import Launch, Variant
from tilewright.compiler.devices import check_gpu
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse

COLD_BYTES = 240_000_000
"""Bytes in all operands, several times the L2 cache."""

MAX_COPIES = 128
Build = Callable[[int], Iterator[Variant]]
"""Returns the variants for a row count."""


def _copies(num_bytes: int) -> int:
    return max(2, min(MAX_COPIES, -(-COLD_BYTES // num_bytes)))


def _pack(values: Any, fmt: str, *, paired: bool) -> Any:
    """Return a packed weight, in tiles of codes or not."""
    from tilewright.compiler.ir.recipe import Segment, WeightRecipe
    from tilewright.compiler.targets.cuda.kernels.matmul import gemv
    from tilewright.compiler.targets.cuda.weights.coded import pack_coded
    from tilewright.compiler.targets.cuda.weights.packing import hold

    if fmt not in gemv.CODED:
        return hold(values, fmt, paired=paired)
    recipe = WeightRecipe((Segment("w", len(values)),), tuple(values.shape), fmt)
    return pack_coded(recipe, lambda name: values, values.device, paired=paired)


def _again(packed: Any) -> Any:
    """Return a packed weight with a copy of the data."""
    return replace(packed, data=packed.data.clone())


def _matmul(rows: int, *, size: tuple[int, int], fmt: str, paired: bool) -> Iterator[Variant]:
    import torch

    from tilewright.compiler.targets.cuda.kernels.elementwise.swiglu import swiglu
    from tilewright.compiler.targets.cuda.kernels.matmul import (
        coded_triton,
        gemm_bf16,
        gemm_block,
        gemm_block_triton,
        gemv,
        gemv_triton,
    )
    from tilewright.compiler.targets.cuda.steps.cublas import store_product
    from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_BYTES

    values = (0.02 * torch.randn(size, device="cuda")).bfloat16()
    first = _pack(values, fmt, paired=paired)
    weights = [first, *(_again(first) for _ in range(_copies(first.data.nbytes) - 1))]
    x = torch.randn(rows, size[1], device="cuda").bfloat16()
    width, dtype = (size[0] // 2, torch.bfloat16) if paired else (size[0], torch.float32)
    out = torch.empty(rows, width, dtype=dtype, device="cuda")
    epilogue = gemv.SWIGLU if paired else gemv.STORE
    variant = partial(Variant, num_copies=len(weights), num_bytes=first.data.nbytes)
    if rows <= gemv.most_tokens(first):
        few: dict[str, Any] = {"epilogue": epilogue, "num_tokens": rows}
        yield variant("gemv", lambda at: gemv.linear(out, x, weights[at], **few))
    if fmt == "bf16" and rows in gemm_bf16.rows_of(first):
        yield variant("dense", lambda at: gemm_bf16.linear(out, x, weights[at], epilogue=epilogue))
    if fmt != "bf16" and rows in gemm_block.rows_of(first, same_bits=False):
        args: dict[str, Any] = {
            "epilogue": epilogue,
            "arranged": gemm_block.scratch(size[1], x.device),
            "way": gemm_block.choose_way(first, rows, same_bits=False),
        }
        yield variant("block", lambda at: gemm_block.linear(out, x, weights[at], **args))
    if rows <= gemv.MAX_TOKENS:
        twin = coded_triton if fmt in gemv.CODED else gemv_triton
        yield variant("triton", lambda at: twin.linear(out, x, weights[at], swiglu=paired))
    if fmt in TILE_BYTES and rows <= gemm_block_triton.MAX_TOKENS:
        splits = gemm_block_triton.split_scratch(x.device)
        how: dict[str, Any] = {"swiglu": paired}
        yield variant(
            "block triton",
            lambda at: gemm_block_triton.linear(out, x, weights[at], splits, **how),
        )
    plain = [values.clone() for _ in range(_copies(values.nbytes))]
    if paired:
        product: Launch = lambda at: swiglu(out, torch.mm(x, plain[at].T), paired=True)  # noqa: E731
    else:
        product = lambda at: store_product(out, x, plain[at])  # noqa: E731
    yield Variant("cublas", product, len(plain), values.nbytes)


def _layer(rows: int, *, fmt: str) -> Iterator[Variant]:
    """Matmuls of a layer of Llama 3.1 8B with their norms, in turn. Only for a single row."""
    import torch

    from tilewright.compiler.targets.cuda.kernels.matmul import gemv

    if rows > 1:
        return
    sizes = {"qkv": (6144, 4096), "o": (4096, 4096), "up": (28_672, 4096), "down": (4096, 14_336)}
    norm = torch.ones(4096, device="cuda"), 1e-5
    x, qkv = torch.randn(1, 4096, device="cuda"), torch.empty(1, 6144, device="cuda")
    attended = torch.randn(1, 4096, device="cuda").bfloat16()
    inner = torch.empty(1, 14_336, device="cuda", dtype=torch.bfloat16)
    first = {
        name: _pack((0.02 * torch.randn(size, device="cuda")).bfloat16(), fmt, paired=name == "up")
        for name, size in sizes.items()
    }
    num_bytes = sum(packed.data.nbytes for packed in first.values())
    layers = [first]
    layers += [{k: _again(v) for k, v in first.items()} for _ in range(max(8, _copies(num_bytes)))]

    def launch(at: int) -> None:
        layer = layers[at]
        gemv.linear(qkv, x, layer["qkv"], epilogue=gemv.STORE, num_tokens=1, norm=norm)
        gemv.linear(x, attended, layer["o"], epilogue=gemv.ADD, num_tokens=1)
        gemv.linear(inner, x, layer["up"], epilogue=gemv.SWIGLU, num_tokens=1, norm=norm)
        gemv.linear(x, inner, layer["down"], epilogue=gemv.ADD, num_tokens=1)

    yield Variant("gemv", launch, len(layers), num_bytes)


def _delta_step(rows: int, *, key_heads: int, heads: int, dim: int) -> Iterator[Variant]:
    import torch

    from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_step
    from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaInputs

    channels, inner, width = (2 * key_heads + heads) * dim, heads * dim, 4
    num_bytes = rows * inner * dim * 4
    layers = _copies(num_bytes)
    state = [torch.randn(rows, heads, dim, dim, device="cuda") for _ in range(layers)]
    a, b = torch.randn(2, rows, heads, device="cuda")
    a_log, dt_bias = torch.randn(2, heads, device="cuda")
    x, z = (torch.randn(rows, size, device="cuda") for size in (channels, inner))
    inputs = DeltaInputs(x, a, b, a_log, dt_bias, key_heads, dim)
    out = torch.empty(rows, inner, dtype=torch.bfloat16, device="cuda")
    fixed: dict[str, Any] = {
        "weight": torch.randn(channels, width, device="cuda"),
        "window": torch.randn(rows, channels, width - 1, device="cuda"),
        "positions": torch.full((rows,), 5, device="cuda"),
        "slots": torch.arange(rows, device="cuda"),
    }
    norm = torch.ones(dim, device="cuda"), 1e-6

    def step(at: int, *, streams: bool) -> None:
        how: dict[str, Any] = {"state": state[at], "early": True, "streams": streams}
        delta_step.delta_step(out, inputs, z, norm, **fixed, **how)

    yield Variant("state kept", partial(step, streams=False), layers, 2 * num_bytes)
    yield Variant("state streamed", partial(step, streams=True), layers, 2 * num_bytes)


def _attention(
    rows: int, *, heads: tuple[int, int, int], fmt: str, position: int
) -> Iterator[Variant]:
    import torch

    from tilewright.compiler.targets.cuda.kernels.attention import attention, split
    from tilewright.compiler.targets.cuda.kernels.attention.decode_triton import decode_scratch
    from tilewright.compiler.targets.cuda.state.pages import PAGE, KVPages

    num_heads, num_kv_heads, head_dim = heads
    num_pages, device = position // PAGE + 1, torch.device("cuda")
    shape = rows * num_pages, 2, num_kv_heads, PAGE, head_dim

    def pages() -> KVPages:
        if fmt == "bf16":
            return KVPages(torch.randn(shape, device="cuda").bfloat16())
        codes = torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)
        blocks = *shape[:-1], head_dim // 16
        return KVPages(codes, torch.randint(124, 128, blocks, device="cuda", dtype=torch.uint8))

    first = pages()
    num_bytes = rows * num_pages * 2 * num_kv_heads * PAGE * head_dim * (2 if fmt == "bf16" else 1)
    caches = [first, *(pages() for _ in range(_copies(num_bytes) - 1))]
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim, device="cuda")
    out = torch.empty(rows, num_heads * head_dim, dtype=torch.bfloat16, device="cuda")
    order = torch.randperm(rows * num_pages, device="cuda").to(torch.int32)
    splits = max(num_pages, split.MAX_GROUPS)
    fixed: dict[str, Any] = {
        "positions": torch.full((rows,), position, device="cuda"),
        "slots": torch.arange(rows, device="cuda"),
        "block_tables": order.view(rows, num_pages),
        "inv_freq": 5e5 ** -(torch.arange(head_dim // 2, device="cuda") / (head_dim // 2)),
        "num_heads": num_heads,
        "scale": head_dim**-0.5,
        "scratch": decode_scratch(rows, num_heads, head_dim, splits, device),
        "early": True,
    }
    for name, strict in (("fast", False), ("strict", True)):
        share = split.share_of_step(
            rows, num_kv_heads, num_pages, head_dim, strict=strict, spreads=fmt == "bf16"
        )
        launch: Launch = lambda at, share=share: attention.attend_decode(  # type: ignore[misc]  # noqa: E731
            caches[at], qkv, out=out, share=share, **fixed
        )
        yield Variant(name, launch, len(caches), num_bytes)


def _sampling(rows: int, *, vocabulary: int) -> Iterator[Variant]:
    """Random logits: nearly all tokens are in a nucleus of 0.95, the slowest case."""
    import torch

    from tilewright.compiler.sampling.params import SamplingParams
    from tilewright.compiler.targets.cuda.outputs.sampling_batch import SamplingFilters, make_choice
    from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
    from tilewright.compiler.targets.interface.step import Slot

    device = torch.device("cuda")
    logits = torch.randn(rows, vocabulary, device=device)
    drawn = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.01)
    kinds: dict[str, tuple[SamplingParams, SamplingFilters | None]] = {
        "greedy": (SamplingParams(), None),
        "temperature": (SamplingParams(temperature=1.0), SamplingFilters(False, False)),
        "top-p": (SamplingParams(temperature=1.0, top_p=0.95), SamplingFilters(False, True)),
        "top-k and top-p": (drawn, SamplingFilters(True, True)),
    }
    slots = [Slot(row) for row in range(rows)]
    for name, (params, drawing) in kinds.items():
        table = SlotTable(rows, 16, device)
        table.open(dict.fromkeys(slots, params))
        choice = make_choice(rows, vocabulary, 16, device)
        choice.gather(table, table.index(slots))
        apply: Launch = lambda _, choice=choice, how=drawing: choice.apply(logits, how)  # type: ignore[misc]  # noqa: E731
        yield Variant(name, apply, 1, logits.nbytes)
    yield Variant("sort", lambda _: torch.sort(logits, descending=True), 1, logits.nbytes)


_SIZES = {
    **{"28672x4096": True, "4096x14336": False, "6144x4096": False, "4096x4096": False},
    **{"8192x28672": False, "128256x4096": False, "12352x2048": False, "2048x4096": False},
}
"""Weight rows and columns, and whether gate and up are paired."""

_DENSE_FORMATS = "bf16", "bfp8", "bfp4", "q40", "q80", "fp8", "nvfp4"
_HEADS = {"8b": (32, 8, 128), "35b-a3b": (16, 2, 256)}

CASES: dict[str, Build] = {
    **{
        f"matmul-{size}-{fmt}": partial(
            _matmul,
            size=(int(size.split("x")[0]), int(size.split("x")[1])),
            fmt=fmt,
            paired=pair,
        )
        for size, pair in _SIZES.items()
        for fmt in _DENSE_FORMATS
    },
    **{f"layer-{fmt}": partial(_layer, fmt=fmt) for fmt in _DENSE_FORMATS},
    **{
        f"attention-{name}-{fmt}-{position}": partial(
            _attention, heads=heads, fmt=fmt, position=position
        )
        for name, heads in _HEADS.items()
        for fmt in ("bf16", "bfp8")
        for position in (230, 2100)
    },
    **{
        f"experts-{fmt}": partial(random_experts, fmt=fmt, top_k=8, hidden=2048, inner=512)
        for fmt in ("bf16", "bfp8", "bfp4")
    },
    **{f"expert-layer-{fmt}": partial(expert_layer, fmt=fmt) for fmt in ("bf16", "bfp8", "bfp4")},
    **{f"biased-experts-{fmt}": partial(biased_experts, fmt=fmt) for fmt in ("bfp8", "mxfp4")},
    "delta-step": partial(_delta_step, key_heads=16, heads=32, dim=128),
    **{f"sampling-{size}": partial(_sampling, vocabulary=size) for size in (128_256, 248_320)},
}
"""The cases. A new case is a line here, and a function if its operands are new."""


def find_cases(patterns: Sequence[str]) -> dict[str, Build]:
    """Return the cases that begin with a pattern.

    Raises:
        ConfigError: for a pattern without a case.
    """
    for pattern in patterns:
        if not any(name.startswith(pattern) for name in CASES):
            families = dict.fromkeys(re.split(r"-", name)[0] for name in CASES)
            raise ConfigError(f"--cases {pattern!r}; {allowed(families)}, or a name of --list")
    return {name: build for name, build in CASES.items() if name.startswith(tuple(patterns))}


def microseconds(variant: Variant, duration_ms: int) -> float:
    """Return the median launch time in CUDA graph replays."""
    from triton.testing import do_bench_cudagraph

    def launch_all() -> None:
        for at in range(variant.num_copies):
            variant.launch(at)

    found = do_bench_cudagraph(launch_all, rep=duration_ms, return_mode="median")
    return 1e3 * float(found) / variant.num_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    cases: tuple[str, ...] = option("case names or their beginnings", default=("",), metavar="NAME")
    rows: tuple[int, ...] = option(
        "rows in a launch", default=(1, 8, 32, 64, 128, 256), type=integer(1, 8192), metavar="N"
    )
    duration_ms: int = option("measurement time, in ms", default=20, type=integer(1, 10_000))
    results: Path | None = option("append figures, as JSON lines", metavar="FILE", type=Path)
    list: bool = option("list the cases", default=False)


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench kernels`` and return the exit code."""
    words = "Measure CUDA kernels."
    options = parse(_Options, argv, prog="python -m bench kernels", description=words)
    cases = find_cases(options.cases)
    if options.list:
        print("\n".join(cases))
        return 0
    check_gpu()
    keep = keeper(options.results)
    import torch

    print(f"{torch.cuda.get_device_name()}: us a launch (TB/s)")
    for name, build in cases.items():
        cells: dict[str, dict[int, str]] = {}
        for rows in options.rows:
            for variant in build(rows):
                time_us = microseconds(variant, options.duration_ms)
                rate = variant.num_bytes / time_us / 1e6
                text = decimal(time_us, 2) + (f" ({decimal(rate, 2)})" if rate else "")
                cells.setdefault(variant.name, {})[rows] = text
                keep({"case": name, "kernel": variant.name, "rows": rows, "us": time_us})
            torch.cuda.empty_cache()
        titles = (name, *(f"{rows} rows" for rows in options.rows))
        lines = [(kernel, *(of.get(n, "") for n in options.rows)) for kernel, of in cells.items()]
        print(Table.of(titles, lines).markdown(), flush=True)
    return 0
