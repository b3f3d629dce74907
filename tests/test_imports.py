"""What an import brings with it: no heavy library where none is needed, no device initialised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

WITHOUT_TORCH = (
    "tilewright",
    "tilewright.compiler",
    "tilewright.compiler.errors",
    "tilewright.compiler.registry",
    "tilewright.compiler.environment",
    "tilewright.compiler.artifacts.places",
    "tilewright.compiler.devices",
    "tilewright.compiler.precision",
    "tilewright.compiler.bench.cases",
    "tilewright.compiler.bench.prompts",
    "tilewright.compiler.bench.results",
    "tilewright.compiler.bench.perf_md",
    "tilewright.compiler.commands.options",
    "tilewright.compiler.commands.chat",
    "tilewright.compiler.commands.run",
    "tilewright.compiler.commands.sweep.control",
    "tilewright.compiler.commands.sweep.main",
    "tilewright.compiler.commands.sweep.options",
    "tilewright.compiler.commands.sweep.run",
    "tilewright.compiler.commands.sweep.show",
    "tilewright.compiler.commands.compile",
    "tilewright.compiler.commands.serve",
    "tilewright.compiler.serve.server",
    "tilewright.models.tokenizer.load",
    "tilewright.models",
    "tilewright.models.config",
    "tilewright.models.checkpoints.headers",
    "bench.peers.command",
    "tilewright.compiler.cli",
)

WITH_TORCH = (
    "tilewright.compiler.ops",
    "tilewright.compiler.driver",
    "tilewright.compiler.commands.source",
    "tilewright.compiler.commands.llm",
)

IMPORT_EACH = """
import importlib, json, os, sys
results = {}
for modules in sys.argv[1:]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        for module in modules.split():
            importlib.import_module(module)
        torch = sys.modules.get("torch")
        names = {"torch", "onnxruntime", "transformers", "triton", "sympy"}
        heavy = sorted(names & set(sys.modules))
        found = [heavy, torch is not None and torch.cuda.is_initialized()]
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    results[modules] = json.loads(os.read(reading, 4096) or "null")
    os.close(reading)
    os.wait()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, tuple[list[str], bool]]:
    """What each module brings in with it, in a process that has imported nothing before: heavy
    libraries, and whether a device is initialised.

    What all together do not bring in, none does; else one interpreter starts and forks for each.
    """
    light, heavy = " ".join(WITHOUT_TORCH), " ".join(WITH_TORCH)
    together = bring_in(light, heavy)
    if together == {light: [[], False], heavy: [["torch"], False]}:
        return {
            **dict.fromkeys(WITHOUT_TORCH, ([], False)),
            **dict.fromkeys(WITH_TORCH, (["torch"], False)),
        }
    return bring_in(*WITHOUT_TORCH, *WITH_TORCH)


def bring_in(*modules: str) -> dict[str, tuple[list[str], bool]]:
    command = [sys.executable, "-c", IMPORT_EACH, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[list[str], bool]] = json.loads(done.stdout)
    assert all(found.values()), f"{[name for name in found if not found[name]]}\n{done.stderr}"
    return found


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str, imported: dict[str, tuple[list[str], bool]]) -> None:
    assert imported[module][0] == []


@pytest.mark.parametrize("module", WITH_TORCH)
def test_initialises_no_device(module: str, imported: dict[str, tuple[list[str], bool]]) -> None:
    """Nor is sympy imported, which a start from the cache has no use for: a quarter of a second."""
    assert "torch" in imported[module][0]
    assert "sympy" not in imported[module][0]
    assert not imported[module][1]
