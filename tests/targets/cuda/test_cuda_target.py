"""The cuda target as a user meets it: passes, folders, commands, and a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.targets.test_weight_storage import ask_for
from tests.tiny import (
    FakeCheckpoint,
    pipeline,
    precision_of,
    prefill,
    random_tokens,
    tiny_model,
)
from tilewright.cli.main import main
from tilewright.compiler.artifacts.folder import open_folder, seal_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.paths import digest_memory
from tilewright.compiler.artifacts.program import write_program
from tilewright.compiler.driver import compile_model
from tilewright.compiler.targets.interface.base import CompileOptions, WeightStorage
from tilewright.errors import CheckpointError, CompileError, ConfigError
from tilewright.utils.removed_variables import check_environment

OPTIONS = CompileOptions(max_batch=2, max_context=32, num_threads=1)
BFP8 = precision_of("bfp8", "hifi2")


class FileCheckpoint(FakeCheckpoint):
    """Tensors in memory, and one file that stands for them."""

    def __init__(self, path: Path, checkpoint: FakeCheckpoint) -> None:
        super().__init__(checkpoint.tensors)
        self.path, self.files = path, (path,)
        path.write_bytes(b"weights")

    def content_hash(self) -> str:
        return "c" * 64


@pytest.fixture
def model(tmp_path: Path) -> SimpleNamespace:
    found = tiny_model(num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, std=0.2)
    found.checkpoint = FileCheckpoint(tmp_path / "model.file", found.checkpoint)
    return found


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one, and nobody who asks for the interpreter."""
    monkeypatch.setattr("tilewright.compiler.devices.num_gpus", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_pipeline_ends_with_the_fused_dialect() -> None:
    names = [current.name for current in pipeline("cuda")]
    assert names[-4:] == [
        *("fuse_rope_attention", "fuse_all_reduce_add"),
        *("gather_before_norm", "fuse_norm_linear"),
    ]
    reference = [current.name for current in pipeline("reference")]
    reference.remove("round_activations")
    assert [name for name in names if name in reference] == reference


def test_what_an_executable_says_of_itself(model: SimpleNamespace) -> None:
    compiled = compile_model(model, BFP8, target="cuda", options=OPTIONS)
    found = compiled.executable.capabilities
    assert (found.max_num_seqs, found.max_context, found.max_prompts) == (2, 32, 1)
    assert (found.page_size, found.num_pages, found.num_snapshots) == (64, 2, 0)
    assert not found.has_sequence_state
    assert found.runs_ahead is torch.cuda.is_available()
    assert compiled.executable.vocab_size == 61
    compiled.executable.close()


@pytest.mark.parametrize("compute", ["fast", "exact"])
def test_a_folder_is_what_was_compiled(
    model: SimpleNamespace, tmp_path: Path, compute: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = write_program(model, BFP8, folder, target="cuda", compute=compute)
    seal_folder(folder, manifest, digest_memory())
    loaded = load_program(folder, open_folder(folder, digest_memory()), OPTIONS)
    options = CompileOptions(max_batch=2, max_context=32, num_threads=1, compute=compute)
    direct = compile_model(model, BFP8, target="cuda", options=options)
    assert (loaded.target, loaded.compute) == ("cuda", compute)
    assert loaded.executable.contract == direct.executable.contract
    assert loaded.executable.memory() == direct.executable.memory()
    tokens = random_tokens(2)
    assert torch.equal(prefill(loaded.executable, tokens), prefill(direct.executable, tokens))


def test_a_folder_is_made_without_a_gpu_and_not_run(
    model: SimpleNamespace, tmp_path: Path, no_gpu: None
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = write_program(model, BFP8, folder, target="cuda")
    with pytest.raises(CompileError, match="this machine has no GPU that torch can use"):
        load_program(folder, manifest, OPTIONS)


@pytest.mark.parametrize("index", [0, 4])
def test_a_damaged_folder_is_refused(model: SimpleNamespace, tmp_path: Path, index: int) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = write_program(model, BFP8, folder, target="cuda")
    (folder / f"weight-{index:05d}.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not a weight of this program"):
        load_program(folder, manifest, OPTIONS)


def test_without_a_gpu_no_weight_is_read(model: SimpleNamespace, no_gpu: None) -> None:
    with pytest.raises(CompileError, match="no GPU"):
        compile_model(model, BFP8, target="cuda", options=OPTIONS)
    assert model.checkpoint.reads == []


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_an_unsupported_format_reads_no_weight(model: SimpleNamespace, name: str) -> None:
    precision = precision_of("bfp8", ff1_3=name)
    with pytest.raises(CompileError, match=rf"ff1_3 .*gate_proj.weight: format {name} on target"):
        compile_model(model, precision, target="cuda", options=OPTIONS)
    assert model.checkpoint.reads == []


def command(*argv: str) -> int:
    return main([*argv])


def run_of(model: str, *more: str) -> tuple[str, ...]:
    asked = ("--prompt", "hi", "--max-generated-tokens", "3", "--no-results")
    return ("bench", "--model", model, "--target", "cuda", *asked, *more)


SHAPE = "shape:tiny"


def test_the_command_without_a_gpu_says_so_in_one_line(
    no_gpu: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is made."""
    made: list[object] = []
    monkeypatch.setattr(torch, "randn", lambda *sizes, **options: made.append(sizes))
    assert command(*run_of(SHAPE)) == 2
    _, err = capfd.readouterr()
    line = err.strip().splitlines()[-1]
    assert (
        "target cuda: this machine has no GPU that its driver knows; allowed: --target cpu" in line
    )
    assert "Traceback" not in err and made == []


@pytest.mark.gpu
def test_the_command_runs_on_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    assert command(*run_of(SHAPE, "--precision", "performance")) == 0
    out, _ = capfd.readouterr()
    assert "on cuda" in out


@pytest.mark.parametrize(("precision", "named"), [("reference", "fp32")])
def test_the_command_names_a_format_it_cannot_take(
    precision: str, named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(*run_of(SHAPE, "--precision", precision)) == 2
    _, err = capfd.readouterr()
    assert f"format {named} on target cuda" in err and "allowed: bf16, bfp8, bfp4, bfp2" in err


def test_the_command_compiles_without_a_gpu(
    no_gpu: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert command("compile", "--model", SHAPE, "--target", "cuda", "-o", str(folder)) == 0
    assert (folder / "weight-00000.safetensors").is_file()
    capfd.readouterr()
    asked = ("--prompt", "hi", "--max-generated-tokens", "3", "--no-results")
    assert command("bench", "--model", str(folder), *asked) == 2
    _, err = capfd.readouterr()
    assert "this machine has no GPU that" in err


def test_the_target_holds_what_it_says_without_its_libraries() -> None:
    found = ask_for("cuda", (64, 128), "bfp4", group="wo")
    assert found == WeightStorage("bfp4 blocks", 4 * 1152)


def test_a_switch_that_no_longer_exists_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CUDA_TRIALS", "rows=64")
    with pytest.raises(ConfigError) as caught:
        check_environment()
    said = "TILEWRIGHT_CUDA_TRIALS: this switch no longer exists; allowed: unset it"
    assert str(caught.value) == said
