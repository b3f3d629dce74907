"""What a packed program needs to run on the native target, and what is refused of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import lowered, precision_of, random_tokens, tiny_model
from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.folder import seal_folder
from tilewright.compiler.artifacts.paths import digest_memory
from tilewright.compiler.artifacts.program import compile_cached, write_program
from tilewright.compiler.driver import compile_model, weight_source
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.cpu.native.program.bundle import PROGRAM
from tilewright.compiler.targets.cpu.native.program.mapping import WEIGHTS
from tilewright.compiler.targets.interface.base import BuiltProgram, CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.interface.step import OpenSlot, PrefillChunk, Slot, Step
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CheckpointError, CompileError, ConfigError

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

BFP8 = precision_of("bfp8", "hifi2", embedding="bf16")

RUN = """
import json, re, sys
from pathlib import Path
import tilewright.llm, tilewright.cli.processes.serve_engine
from tilewright.compiler.artifacts.folder import open_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.paths import digest_memory
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime.service import EngineService
from tilewright.compiler.targets.interface.base import CompileOptions

folder = Path(sys.argv[1])
compiled = load_program(folder, open_folder(folder, digest_memory()), CompileOptions(2, 64))
loop = EngineLoop(compiled.executable)
requests = [
    RequestState(0, (1, 2, 3), SamplingParams(max_tokens=9)),
    RequestState(1, (4, 5), SamplingParams(max_tokens=9, temperature=0.8, seed=1, logprobs=2)),
]
loop.generate(requests)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
use = compiled.executable.memory()
compiled.executable.close()
print(json.dumps([[r.output for r in requests], peak, use.weights, "torch" in sys.modules]))
"""


def test_a_packed_program_runs_without_torch(model: SimpleNamespace, tmp_path: Path) -> None:
    """Greedily and drawn, in no more than its weights, its cache and 150 MB."""
    folder = program_in(tmp_path, model)
    command = [sys.executable, "-P", "-c", RUN, str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    outputs, peak, weights, has_torch = json.loads(said.stdout)
    assert [len(each) for each in outputs] == [9, 9]
    assert not has_torch
    assert peak <= weights + 150e6


def program_in(tmp_path: Path, model: SimpleNamespace) -> Path:
    """The folder of the compiled model."""
    folder = tmp_path / "program"
    folder.mkdir()
    seal_folder(folder, write_program(model, BFP8, folder, target="cpu-native"), digest_memory())
    return folder


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_cache_without_room_is_refused_before_a_weight_is_read(
    is_cached: bool, model: SimpleNamespace, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"target": "cpu-native", "options": CompileOptions(1 << 40, 32)}
    cached = functools.partial(compile_cached, cache=ProgramCache(tmp_path, 1 << 30))
    with pytest.raises(CompileError, match=r"allowed: up to \d+ sequences") as said:
        (cached if is_cached else compile_model)(model, BFP8, **asked)
    assert "\n" not in str(said.value)
    assert not model.checkpoint.reads


@pytest.mark.parametrize("name", ["TILEWRIGHT_LARGE_PAGES", "TILEWRIGHT_NATIVE_TIMES"])
def test_a_switch_that_is_neither_is_refused_before_a_weight_is_read(
    name: str, model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "off")
    with pytest.raises(ConfigError, match=f"^{name}='off'; allowed: 0 or 1$"):
        compile_model(model, BFP8, target="cpu-native", options=CompileOptions(1, 32))
    assert not model.checkpoint.reads


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the two files of a tiny program."""

    model, folder = tiny_model(num_layers=1), tmp_path_factory.mktemp("packed")
    graph_module = lowered(model, target="cpu-native", precision=BFP8)[0]
    options = CompileOptions(2, 64, num_threads=1)
    get_target("cpu-native").build(graph_module, weight_source(model), folder, options, silent)
    return folder


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_files_are_refused_or_give_numbers(
    data: st.DataObject, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut short, longer, other bytes: one line, or a program that runs within its memory."""
    folder = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from([PROGRAM, WEIGHTS]))
    for each in (PROGRAM, WEIGHTS):
        content = (whole / each).read_bytes()
        (folder / each).write_bytes(damaged(data, content) if each == name else content)
    program = BuiltProgram(folder, NumericContract((), ()), _no_graph, _no_graph)
    try:
        executable = get_target("cpu-native").load(program, CompileOptions(2, 64), silent)
    except (CheckpointError, CompileError) as error:
        said = str(error)
        assert "\n" not in said
        return
    tokens = [each % executable.vocab_size for each in random_tokens(5)]
    step = Step(
        prompts=(PrefillChunk(Slot(0), 0, tuple(tokens), chooses=True),),
        edits=(OpenSlot(Slot(0), SamplingParams()),),
    )
    (part,) = executable.step(step).parts
    assert len(part.read().tokens) == 1
    executable.close()


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Other bytes than these, or fewer, or more; of numbers in a text, other digits."""
    what = data.draw(st.sampled_from(["cut", "longer", "bytes", "digits"]))
    if what == "cut":
        return content[: data.draw(st.integers(0, len(content) - 1))]
    if what == "longer":
        return content + data.draw(st.binary(min_size=1, max_size=64))
    changed = bytearray(content)
    allowed = b"0123456789" if what == "digits" else bytes(range(256))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.sampled_from(allowed))
    return bytes(changed)


def _no_graph() -> Any:
    raise AssertionError("a packed program asked for its graph")
