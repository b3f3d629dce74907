"""What an import brings with it: no heavy library where none is needed, no device initialised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WITHOUT_TORCH = (
    "tilewright",
    "tilewright.compiler",
    "tilewright.errors",
    "tilewright.utils.registry",
    "tilewright.utils.environment",
    "tilewright.compiler.artifacts.paths",
    "tilewright.compiler.devices",
    "tilewright.compiler.precision",
    "tilewright.evaluate.cases.cases",
    "tilewright.evaluate.cases.prompts",
    "tilewright.evaluate.results.result_file",
    "tilewright.evaluate.report.perf_md",
    "tilewright.cli.arguments.bench",
    "tilewright.cli.commands.chat",
    "tilewright.cli.commands.run",
    "tilewright.cli.sweep.control",
    "tilewright.cli.sweep.main",
    "tilewright.cli.arguments.sweep",
    "tilewright.cli.sweep.run",
    "tilewright.cli.sweep.show",
    "tilewright.cli.commands.compile",
    "tilewright.cli.commands.serve",
    "tilewright.serve.web.server",
    "tilewright.models.tokenizer.load",
    "tilewright.models",
    "tilewright.models.config",
    "tilewright.models.checkpoints.headers",
    "bench.baselines.compare",
    "tilewright.cli.main",
    "tilewright.cli.processes.batch_engine",
    "tilewright.cli.processes.serve_engine",
    "tilewright.compiler.artifacts.start",
    "tilewright.llm",
    "tilewright.loading.source",
)

WITH_TORCH = (
    "tilewright.compiler.ops",
    "tilewright.compiler.driver",
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


def bring_in(*modules: str) -> dict[str, list[object]]:
    command = [sys.executable, "-c", IMPORT_EACH, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    assert all(found.values()), f"{[name for name in found if not found[name]]}\n{done.stderr}"
    return found


def test_imports_bring_in_no_more_than_they_need() -> None:
    """No torch and no initialised device. With torch, no sympy: it takes a quarter of a second.

    A process imports all modules of a kind. If it differs, a process for each module names it.
    """
    light, heavy = " ".join(WITHOUT_TORCH), " ".join(WITH_TORCH)
    without, torch = [[], False], [["torch"], False]
    if bring_in(light, heavy) != {light: without, heavy: torch}:
        expected = dict.fromkeys(WITHOUT_TORCH, without) | dict.fromkeys(WITH_TORCH, torch)
        assert bring_in(*expected) == expected


IMPORT_ALL_WITHOUT = """
import importlib, json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ImportError(f"{name} is missing")

sys.meta_path.insert(0, Missing())
for missing, modules in json.load(sys.stdin):
    for module in modules:
        importlib.import_module(module)
    assert not {name.partition(".")[0] for name in sys.modules} & {*missing}
"""
CUDA = "tilewright.compiler.targets.cuda."


def test_only_the_cuda_target_needs_triton_and_no_module_needs_cuda_bindings() -> None:
    """A machine without a GPU has neither library, and other GPUs need no CUDA C++."""
    rooms = [ROOT / "compiler", ROOT / "models"]
    rooms += [room for room in (ROOT / "tilewright").iterdir() if not room.is_symlink()]
    parts = [
        path.relative_to(ROOT).with_suffix("").parts
        for room in rooms
        for path in sorted(room.rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    names = [".".join(each if each[0] == "tilewright" else ("tilewright", *each)) for each in parts]
    own = [name for name in names if name.startswith(CUDA) or name.endswith("_cuda")]
    without_triton = [name for name in names if name not in own]
    assert len(own) > 50 and len(without_triton) > 300
    cases = [(("cuda", "triton"), without_triton), (("cuda",), own)]
    command = [sys.executable, "-c", IMPORT_ALL_WITHOUT]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
