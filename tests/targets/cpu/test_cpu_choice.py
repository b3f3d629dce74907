"""What runs target ``cpu`` where nobody says: native where it is built."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

import tilewright
from tests import architecture_checks as checks
from tests.models.test_every_architecture import MODULES, TARGETS
from tests.targets.cpu.native.test_native import DENSE
from tests.targets.cpu.native.test_native_mixers import MIXERS
from tests.tiny import lowered, tiny_model
from tilewright.compiler.targets.cpu import backend as choice
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build, recipe
from tilewright.compiler.targets.cpu.native.program.assemble import assemble
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.program.instructions import Needs
from tilewright.compiler.targets.program.lowering import lower_to_program
from tilewright.errors import CompileError, ConfigError
from tilewright.models.architectures.table import model_types
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import resolve

RUN_NATIVELY = {name for name in MODULES if "cpu-native" in TARGETS.get(name, checks.EVERY_TARGET)}
has_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """No library is there yet, nor in this process."""
    monkeypatch.setenv("TILEWRIGHT_NATIVE", str(tmp_path / "native"))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "package" / "build.py"))  # no kernels
    for each in (build.library_path, library.library):
        each.cache_clear()
    yield monkeypatch
    for each in (build.library_path, library.library):
        each.cache_clear()


@has_compiler
def test_native_is_chosen_where_it_is_built() -> None:
    target, why = choice.choose_backend(silent)
    best = library.library().tw_best_isa()
    assert target == ("cpu-native" if best else "cpu")
    assert why == f"backend auto: native, {library.ISA_NAMES[best]}" or not best


def test_a_compiled_model_is_on_what_the_name_means_here() -> None:
    for name, full in (("auto", choice.choose_backend(silent)[0]), ("onnxruntime", "cpu")):
        config = EngineConfig(backend=name, max_model_len=32, max_num_seqs=1, use_cache=False)
        compiled = tilewright.compile("shape:tiny", config)
        assert compiled.target == full
        compiled.executable.close()


@pytest.mark.parametrize(
    "model_type", [name for name in model_types() if name not in (*DENSE, *MIXERS, *RUN_NATIVELY)]
)
def test_native_has_kernels_for_every_architecture(model_type: str) -> None:
    """The others are compared with the reference."""
    tests = importlib.import_module(f"tests.models.test_{model_type}")
    changes = {"num_layers": 1, **getattr(tests, "ON_CUDA", {})}
    graph_module = lowered(tiny_model(model_type=model_type, **changes), target="cpu-native")[0]
    plan = lower_to_program(graph_module, Needs(target="cpu", others="reference"))
    assert assemble(plan, exact=False).instructions


def test_a_compiler_that_fails_is_one_line(unbuilt: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no\nmore' >&2\nexit 1\n")
    broken.chmod(0o755)
    unbuilt.setenv("CXX", str(broken))
    target, why = choice.choose_backend(silent)
    assert target == "cpu" and "\n" not in why
    assert why.startswith("backend auto: onnxruntime, for native cannot be built: the C++ compiler")
    assert "error: no" in why


def test_a_library_that_came_with_the_package_needs_no_compiler(
    unbuilt: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where it is of these very sources; another is not looked at."""
    unbuilt.setenv("CXX", "no-such-compiler")
    unbuilt.setattr(build, "__file__", str(tmp_path / "build.py"))
    (tmp_path / "kernels-0123456789abcdef.so").touch()
    with pytest.raises(CompileError, match=r"no C\+\+ compiler"):
        build.library_path()
    (tmp_path / recipe.packaged_name()).touch()
    assert build.library_path() == tmp_path / recipe.packaged_name()


@has_compiler
def test_a_library_that_another_process_built_meanwhile_is_used(
    unbuilt: pytest.MonkeyPatch,
) -> None:
    """The other process has the lock first, and builds every instruction set."""
    compiler = build.find_compiler()
    assert compiler is not None
    library = build._cached_library(compiler, recipe.units())
    unbuilt.setattr(build, "own_units", lambda: recipe.units()[:1])
    unbuilt.setattr(build.fcntl, "flock", lambda *_: library.touch())
    assert build.library_path() == library


@has_compiler
def test_a_compiler_may_be_several_words(unbuilt: pytest.MonkeyPatch) -> None:
    """As ``CXX="ccache g++"``; what ``CXXFLAGS`` says comes before our own flags, and is keyed."""
    found = build.find_compiler()
    assert found is not None
    unbuilt.setenv("CXX", f"env {found[0]}")
    words = build.find_compiler()
    assert words is not None and Path(words[0]).name == "env" and words[1:] == found[:1]
    before = build._key(words)
    unbuilt.setenv("CXXFLAGS", "-O0 '-DA=a b'")
    command = recipe.commands(words, Path("objects"), Path("library.so"))[0]
    assert command[:4] == [*words, "-O0", "-DA=a b"] and command.index("-O2") > 2
    assert build._key(words) != before


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CXX", "g++ 'x", 'CXX="g[+][+] \'x": No closing quotation; allowed: words of a shell'),
        ("CXXFLAGS", "-g -ffast-math", "CXXFLAGS: -ffast-math; allowed: flags that keep the order"),
    ],
)
def test_a_variable_that_would_do_harm_is_refused_by_name(
    name: str, value: str, said: str, unbuilt: pytest.MonkeyPatch
) -> None:
    unbuilt.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{said}"):
        choice.choose_backend(silent)


def test_a_wheel_asks_for_kernels_with_1_alone() -> None:
    """The setting is setup.py's; it reads it where nothing is installed yet."""
    read = recipe.switch
    assert [read("A", False, {"A": text}) for text in ("", "0", "1")] == [False, False, True]
    for text in ("yes", "true", " 1"):
        with pytest.raises(ValueError, match=f"^A='{text}'; allowed: 0 or 1$"):
            read("A", False, {"A": text})


def test_first_use_compiles_only_the_best_instruction_set(
    unbuilt: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    unbuilt.setattr(recipe, "_PROCESSOR", info)
    unbuilt.setattr(recipe.platform, "machine", lambda: "x86_64")
    for flags, expected in (("sse2 avx2 fma f16c", {"isa_avx2"}), ("sse2", None)):
        info.write_text(f"model name\t: X\nflags\t\t: {flags}\n")
        tables = {unit.stem for unit in recipe.own_units() if unit.stem.startswith("isa_")}
        assert tables == (expected or {"isa_avx512", "isa_avx2", "isa_scalar"})
    commands = recipe.commands(["c++"], tmp_path, tmp_path / "library.so", recipe.own_units()[:3])
    sources = [unit for unit in recipe.own_units()[:3] if not unit.stem.startswith("isa_")]
    assert all(any(str(unit) in words for words in commands) for unit in sources)
    assert len(commands) == 2  # units without an instruction set share a command


@has_compiler
def test_loading_a_model_begins_to_build_missing_kernels(
    unbuilt: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\ntouch $(dirname $0)/began\nexit 1\n")
    compiler.chmod(0o755)
    unbuilt.setenv("CXX", str(compiler))
    resolved = resolve(EngineConfig(model="shape:tiny", backend="native"))
    tilewright.load("shape:tiny", config=resolved)
    deadline = time.monotonic() + 10
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "began").exists()
