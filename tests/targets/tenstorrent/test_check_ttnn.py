"""Emitted files and formats against ttnn on mock clusters, with `make check-ttnn`.

Slow. Skipped unless TILEWRIGHT_TTNN_PYTHON is a Python with ttnn 0.81. The mock checks operators
and allocates memory, without values.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from tests.targets.tenstorrent.boards import board, board_precision, programs
from tests.targets.tenstorrent.test_emit_ttnn import MODERN
from tests.tiny import QWEN2, lowered, tiny_config, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.tenstorrent.emit_ttnn.emit import (
    emit_ttnn,
    prompt_length,
    write_weights,
)
from tilewright.compiler.targets.tenstorrent.lower.graph import lower_program
from tilewright.compiler.targets.tenstorrent.program.chips import load_weight
from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram, Rotate
from tilewright.compiler.targets.tenstorrent.program.memory_plan import check_memory, plan_memory
from tilewright.errors import CompileError
from tilewright.models.architectures.table import architecture_of

VARIABLE = "TILEWRIGHT_TTNN_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
CHECKS = Path(__file__).parents[2] / "check_ttnn"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason=f"{VARIABLE} names no Python that has ttnn"),
]

# hidden, heads, key/value heads, columns per head, MLP columns, vocabulary, layers
SHAPES = {
    "SmolLM2-135M": (576, 9, 3, 64, 1536, 49152, 30),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192, 128256, 16),
    "Llama-3.1-8B": (4096, 32, 8, 128, 14336, 128256, 32),
    "Llama-3.1-70B": (8192, 64, 8, 128, 28672, 128256, 80),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944, 152064, 28),
}

# model, board, mesh unless default, users, precision
CASES: list[tuple[str, str, Mesh | None, int, str]] = [
    ("SmolLM2-135M", "n150", None, 1, "performance"),
    ("SmolLM2-135M", "n150", None, 32, "accuracy"),
    ("Llama-3.2-1B", "n150", None, 1, "performance"),
    ("Llama-3.2-1B", "n150", None, 32, "bf16"),
    ("Llama-3.2-1B", "n300", None, 1, "accuracy"),
    ("Llama-3.2-1B", "t3k", None, 1, "performance"),
    ("Llama-3.1-8B", "n300", None, 1, "performance"),
    ("Llama-3.1-8B", "t3k", None, 32, "performance"),
    ("Llama-3.1-8B", "t3k", Mesh(4, 2), 1, "performance"),
    ("Llama-3.1-70B", "t3k", None, 1, "performance"),
    ("Llama-3.1-70B", "t3k", None, 32, "all-bfp4"),
    ("Qwen2.5-7B", "n300", None, 1, "performance"),
    ("Llama-3.1-8B", "p150", None, 1, "accuracy"),
    ("Llama-3.1-8B", "p100", None, 32, "performance"),
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Board descriptions and compiled kernels for all checks."""
    return tmp_path_factory.mktemp("ttnn")


def shaped(name: str, num_layers: int) -> SimpleNamespace:
    """Return a model with given sizes, without weights."""
    hidden, heads, kv_heads, head_dim, mlp, vocabulary, _ = SHAPES[name]
    kind: dict[str, Any] = dict(QWEN2) if name.startswith("Qwen") else {}
    config = tiny_config(
        name=name,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        num_layers=num_layers,
        **kind,
    )
    with torch.device("meta"):
        module: Any = architecture_of(config.model_type).model(config)
    return SimpleNamespace(name=name, config=config, module=module)


def shaped_programs(
    name: str,
    device: str,
    *,
    mesh: Mesh | None = None,
    users: int = 1,
    precision: str = "performance",
    num_layers: int = 2,
    context: int = 2048,
) -> tuple[DeviceProgram, DeviceProgram]:
    """Return prefill and decode programs, regardless of memory."""
    chosen: PrecisionConfig = load_precision(precision)
    graph_module, _ = lowered(shaped(name, num_layers), target=device, precision=chosen)
    prefill, decode = (
        lower_program(
            graph_module,
            device=device,
            mesh=mesh or board(name=device).mesh,
            phase=phase,
            batch=batch,
            length=length,
            context=context,
        )
        for phase, batch, length in (
            ("prefill", 1, prompt_length(context)),
            ("decode", users, 1),
        )
    )
    return prefill, decode


def run(script: str, *arguments: object) -> str:
    """Run a check in the ttnn Python and return its output."""
    done = subprocess.run(
        [PYTHON, str(CHECKS / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def validated(source: str, device: str, scratch: Path) -> dict[str, Any]:
    """Return the result of every operator in a file on a mock board."""
    path = scratch / "emitted.py"
    path.write_text(source)
    found: dict[str, Any] = json.loads(run("check_file.py", path, device, scratch).splitlines()[-1])
    return found


def errors(found: dict[str, Any]) -> list[str]:
    return [f"{e['phase']} {e['operator']}: {e['error']}" for e in found["operators"] if e["error"]]


@pytest.mark.parametrize(("name", "device", "mesh", "users", "precision"), CASES)
def test_every_operator_validates(
    name: str,
    device: str,
    mesh: Mesh | None,
    users: int,
    precision: str,
    scratch: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = shaped_programs(name, device, mesh=mesh, users=users, precision=precision)
    found = validated(emit_ttnn(*made), device, scratch)
    phases = Counter(each["phase"] for each in found["operators"])
    with capsys.disabled():
        print(
            f"\n{name} on {device} {made[1].mesh}, {users} users, {precision}: "
            f"{phases['prefill']} + {phases['decode']} operators of prefill and decode, "
            f"{len(errors(found))} refused",
            end="",
        )
    assert errors(found) == []
    kinds = {(each["phase"], each["operator"]) for each in found["operators"]}
    assert ("decode", "transformer.paged_scaled_dot_product_attention_decode") in kinds
    assert ("prefill", "transformer.chunked_scaled_dot_product_attention") in kinds
    assert phases["decode"] > 40 and phases["prefill"] > 40


def test_rotations_of_neighbours_and_windows_of_some_layers_validate(scratch: Path) -> None:
    model = tiny_model(hidden_size=128, intermediate_size=96, head_dim=64, windows=(64, 0))
    options = CompileOptions(max_batch=2, max_context=256)
    made = [
        dataclasses.replace(
            program,
            instructions=tuple(
                dataclasses.replace(each, interleaved=True) if isinstance(each, Rotate) else each
                for each in program.instructions
            ),
        )
        for program in programs(model, options=options)
    ]
    source = emit_ttnn(*made)
    assert "rotary_embedding_llama" in source and "sliding_window_size" in source
    found = validated(source, "n150", scratch)
    assert errors(found) == []


@pytest.mark.parametrize(
    ("name", "board_name"),
    [(name, chip) for name in MODERN for chip in ("n150", "p150")] + [("qwen3_5_moe", "n300")],
)
def test_models_of_today_validate(name: str, board_name: str, scratch: Path) -> None:
    """Experts, Gated DeltaNet, two rotations, sinks and partial rotations.

    On two chips, prompts of Gated DeltaNet are summed in float32.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 64}
    model = tiny_model(**{**sizes, "model_type": name, **MODERN[name]})
    precision = board_precision(router="bf16")
    options = CompileOptions(max_batch=2, max_context=256)
    made = programs(model, precision=precision, options=options, name=board_name)
    found = validated(emit_ttnn(*made), board_name, scratch)
    assert errors(found) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "operator"),
    [
        pytest.param(
            r'("mlp.down_proj.weight": Weight\("matrix", )8192', r"\g<1>8160", "linear", id="K"
        ),
        pytest.param(r"\n +layout=ttnn.TILE_LAYOUT,", "", "rms_norm", id="a layout"),
        pytest.param(r"pieces=\d+\)", "pieces=1)", "linear", id="too much L1"),
        pytest.param(
            r"num_heads=32", "num_heads=31", "experimental.nlp_create_qkv_heads", id="heads"
        ),
        pytest.param(
            r'"k": ttnn.bfloat8_b',
            '"k": ttnn.bfloat16',
            "experimental.paged_fill_cache",
            id="a format",
        ),
    ],
)
def test_a_file_broken_on_purpose_is_refused(
    pattern: str, replacement: str, operator: str, scratch: Path
) -> None:
    source = emit_ttnn(*shaped_programs("Llama-3.2-1B", "n150"))
    broken, count = re.subn(pattern, replacement, source)
    assert count
    found = validated(broken, "n150", scratch)
    assert [e["operator"] for e in found["operators"] if e["error"]] == [operator]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("SmolLM2-135M", "n150"),
        ("Llama-3.2-1B", "n300"),
        ("Llama-3.1-8B", "n150"),
        ("Llama-3.1-8B", "p100"),
        ("Llama-3.1-70B", "t3k"),
    ],
)
def test_whole_models_fit_and_take_what_the_plan_says(
    name: str, device: str, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shaped_programs(name, device, num_layers=SHAPES[name][-1])
    plan = check_memory(*made)
    found = validated(emit_ttnn(*made), device, scratch)
    assert errors(found) == []
    planned = plan.weight_bytes + plan.cache_bytes
    with capsys.disabled():
        print(
            f"\n{name} on {device}: {found['dram_bytes'] / 1e9:.3f} GB a chip allocated, "
            f"{planned / 1e9:.3f} GB of weights and caches planned",
            end="",
        )
    assert 0.99 < found["dram_bytes"] / planned < 1.05


def test_a_model_too_large_is_refused_by_the_plan_and_by_the_allocator(scratch: Path) -> None:
    made = shaped_programs("Llama-3.1-8B", "n150", precision="bf16", num_layers=32)
    with pytest.raises(CompileError, match="GB a chip"):
        check_memory(*made)
    assert plan_memory(made[1]).dram_bytes > 12_870_000_000
    found = validated(emit_ttnn(*made), "n150", scratch)
    (error,) = errors(found)
    assert error.startswith("load") and "Out of Memory" in error


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2), Mesh(8), Mesh(4, 2)], ids=str)
def test_every_chip_gets_the_weights_that_the_emulator_has(
    mesh: Mesh, scratch: Path, tmp_path: Path
) -> None:
    """Bit for bit, with uneven heads and columns."""
    device = {1: "n150", 2: "n300", 8: "t3k"}[mesh.num_chips]
    changes: dict[str, Any] = {} if mesh.columns > 1 else QWEN2
    model = tiny_model(
        hidden_size=128,
        intermediate_size=288,
        num_heads=12,
        num_kv_heads=3,
        head_dim=32,
        tie_embeddings=False,
        **changes,
    )
    precision = board_precision("bfp8", ff1_3="bfp4", wo="bf16", layers="1: {ff2: bfp4}")
    options = CompileOptions(max_context=64)
    made = programs(model, mesh, precision=precision, options=options, name=device)
    file, out = tmp_path / "emitted.py", tmp_path / "values.npz"
    file.write_text(emit_ttnn(*made))
    write_weights(made[1], weight_source(model), tmp_path)
    run("check_weights.py", file, device, tmp_path, out, scratch)
    values = numpy.load(out)
    num_compared = 0
    for weight in made[1].weights:
        if weight.format == "fp32":  # rotation frequencies
            continue
        dealt = load_weight(weight, mesh, weight_source(model))
        for row in range(mesh.columns):
            for column in range(mesh.rows):
                theirs = torch.from_numpy(values[f"{weight.name}@{row}.{column}"])
                ours = dealt[column, row].float()
                assert torch.equal(theirs.view(ours.shape), ours), (weight.name, row, column)
                num_compared += ours.numel()
    assert num_compared > 100_000


def special_matrices() -> dict[str, numpy.ndarray]:
    """Return fifty matrices: random scales, and hard cases for conversions."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = []
    for _ in range(30):
        rows, columns = (16 * int(torch.randint(1, 9, (), generator=generator)) for _ in "rc")
        found.append(
            normal(rows, columns) * 10.0 ** int(torch.randint(-6, 7, (), generator=generator))
        )
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 64), generator=generator)
    patterns = bits.to(torch.int32).view(torch.float32)
    patterns = torch.where(patterns.isfinite(), patterns, torch.zeros(()))
    halves = torch.randint(-255, 256, (64, 64), generator=generator) / 2
    found += [patterns, patterns.abs(), -patterns, halves, halves / 64 + 1e-7]
    found += [torch.full((32, 32), each) for each in (0.0, -0.0, 1e-45, 3.4e38, 1 + 2**-23)]
    found += [
        normal(64, 64).bfloat16().float(),
        normal(33, 47),
        torch.linspace(-2, 2, 4096).view(64, 64),
    ]
    found += [torch.arange(4096.0).view(64, 64), torch.sign(halves) * (1 - 2**-9)]
    found += [(2.0 ** torch.arange(-126, -62).float()).view(2, 32).repeat(16, 1)]
    uneven, peaks, infinite, undefined = (normal(64, 64) for _ in range(4))
    uneven[::3] *= 1e-20
    peaks[:, ::16] = 2.0**100
    infinite[0, 0], infinite[1, 20] = float("inf"), float("-inf")
    undefined[3, 5] = float("nan")
    found += [uneven, peaks, infinite, undefined]
    return {f"{number:02}": matrix.float().numpy() for number, matrix in enumerate(found)}


def test_no_element_differs_from_the_conversion_of_ttnn(
    scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrices = special_matrices()
    assert len(matrices) == 50
    numpy.savez(tmp_path / "in.npz", **matrices)  # type: ignore[arg-type]
    run("check_formats.py", tmp_path / "in.npz", tmp_path / "out.npz", scratch)
    theirs = numpy.load(tmp_path / "out.npz")
    num_elements = num_differing = 0
    for name, matrix in matrices.items():
        for format_name in ("bfp8", "bfp4"):
            ours = get_format(format_name).round_trip(torch.from_numpy(matrix)).numpy()
            given = theirs[f"{name}.{format_name}"]
            same = ours.view(numpy.int32) == given.view(numpy.int32)
            same |= numpy.isnan(ours) & numpy.isnan(given)
            num_elements, num_differing = num_elements + same.size, num_differing + (~same).sum()
    with capsys.disabled():
        print(f"\n{num_differing} of {num_elements} elements of 50 tensors differ", end="")
    assert num_differing == 0 and num_elements > 400_000


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2)], ids=str)
def test_the_command_goes_from_prompts_to_tokens(mesh: Mesh, scratch: Path, tmp_path: Path) -> None:
    """All except trace recording, which crashes on a mock. Tokens are random."""
    device = "n150" if mesh.num_chips == 1 else "n300"
    model = tiny_model(hidden_size=128, intermediate_size=96, head_dim=32)
    options = CompileOptions(max_batch=3, max_context=64)
    made = programs(model, mesh, options=options, name=device)
    file = tmp_path / "emitted.py"
    file.write_text(emit_ttnn(*made))
    write_weights(made[1], weight_source(model), tmp_path)
    flags = ["--run-on-device", "--no-trace", "--max-new-tokens", "3", "--tokens", "1 2 3"]
    printed = run("check_main.py", file, device, scratch, *flags, "--tokens", "4").splitlines()
    answers = [line.split() for line in printed if re.fullmatch(r"\d+( \d+)*", line)]
    assert [len(answer) for answer in answers] == [3, 3]
    assert all(0 <= int(token) < 61 for answer in answers for token in answer)


def test_without_a_board_a_file_says_so_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    model = tiny_model(hidden_size=64, intermediate_size=96, head_dim=32)
    options = CompileOptions(max_context=64)
    path.write_text(emit_ttnn(*programs(model, options=options)))
    for arguments, said in (
        (["--run-on-device", "--tokens", "1 2"], "no Tenstorrent chips found"),
        ([], "--run-on-device"),
    ):
        command = [PYTHON, str(path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        lines = [line for line in done.stderr.splitlines() if said in line]
        assert done.returncode == 2 and len(lines) == 1, done.stderr
