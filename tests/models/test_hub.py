"""Names on the hub: which strings are names, what is fetched, and what can go wrong; no network."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import hypothesis
import hypothesis.strategies as st
import pytest
from huggingface_hub import constants, errors

from tilewright.cli.main import main
from tilewright.errors import CheckpointError
from tilewright.models import find_model, load_model
from tilewright.models.hub import HubName, parse_hub_name, repository_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b@main", HubName("a/b", "main")),
        ("a/b_@refs/pr/1", HubName("a/b_", "refs/pr/1")),
        (f"a/b@{COMMIT}", HubName("a/b", COMMIT)),
        ("a/b:c-q4_0.gguf", HubName("a/b", None, "c-q4_0.gguf")),
        ("a/b@v1.0:dir/c d.GGUF", HubName("a/b", "v1.0", "dir/c d.GGUF")),
    ],
)
def test_names(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "smollm2", "Qwen", "/a/b", "./a", "../a", "~/a", "~a/b", "a/", "/a", "a/b/c", "a//b"),
        *("a/b.gguf", "a/b.safetensors", "a/.b", ".a/b", "a/b.", "a/b-", "-a/b", "a/..", "../b"),
        *("a/b--c", "a/b c", "a\\b", "a/b\n", "ä/b", "a/b@", "a/b:", "a/b:c.bin", "a/b:../c.gguf"),
        *("a/b:/c.gguf", "a/b@../c", "a/b@-x", "a/b@x/", "a/b@x y", "a/b:c:d.gguf", "a/b:c\n.gguf"),
        *("hf://a/b", "https://huggingface.co/a/b", "a/" + "b" * 96),
    ],
)
def test_not_names(text: str) -> None:
    assert parse_hub_name(text) is None


@hypothesis.given(st.text("ab/.@:-~ \\\n0", max_size=20) | st.text(max_size=20))
def test_any_text_is_a_name_or_not(text: str) -> None:
    name = parse_hub_name(text)
    if name is not None:
        assert str(name) == text
        assert ".." not in text and text.count("\n") == 0
        assert not text.startswith((".", "/", "~"))
        huggingface_hub.utils.validate_repo_id(name.repository)


class Hub:
    """Stands in for the library: notes what is asked for, answers with a folder or an error."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answer: Path | Exception | None = None

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.asked.append((repo_id, options))
        if isinstance(self.answer, Path):
            return str(self.answer)
        assert self.answer is not None
        raise self.answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the library's own, which is offline."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def add_to_cache(cache: Path, repository: str, source: Path) -> Path:
    """As the library lays it out: blobs, links to them in a snapshot, and a reference to that."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, home / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


@pytest.fixture
def folder(tmp_path: Path, make_qwen2: Callable[..., Any]) -> Path:
    """Qwen2 in shards, with a tokenizer."""
    from tests.models.test_tokenizer import PIPELINES, train_byte_level

    backend = train_byte_level(*PIPELINES["qwen2"])
    path = tmp_path / "source"
    make_qwen2(vocab_size=backend.get_vocab_size()).save_pretrained(path, max_shard_size="60KB")
    backend.save(str(path / "tokenizer.json"))
    return path


def refusal(text: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_model(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_asked_for(hub: Hub, folder: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    hub.answer = folder
    assert find_model("Qwen/Qwen2-x@v1") == folder
    [(repository, options)] = hub.asked
    assert (repository, options["revision"]) == ("Qwen/Qwen2-x", "v1")
    files = [*(file.name for file in folder.iterdir()), "pytorch_model.bin", "original/x.pth"]
    settings = {"hf_quant_config.json", "preprocessor_config.json", "processor_config.json"}
    files += [
        *settings,
        "original/model.safetensors",
        "consolidated.safetensors",
        "README.md",
        "a.gguf",
    ]
    taken = set(
        filter_repo_objects(
            files,
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
    )
    assert taken == {file.name for file in folder.iterdir()} | settings


def test_one_file(hub: Hub, tmp_path: Path) -> None:
    hub.answer = tmp_path
    (tmp_path / "m[1].gguf").write_bytes(b"GGUF")
    assert find_model("a/b:m[1].gguf") == tmp_path / "m[1].gguf"
    assert hub.asked[0][1]["allow_patterns"] == ["m[[]1].gguf"]
    assert refusal("a/b:other.gguf").startswith("a/b:other.gguf: other.gguf is neither")


def test_a_local_path_wins(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen").mkdir()
    folder.rename(tmp_path / "Qwen" / "local")
    (tmp_path / "Qwen" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("Qwen/local") == Path("Qwen/local")
    assert "no config.json" in refusal("Qwen/empty")
    for text in ("./Qwen/x", "~/Qwen", "Qwen/x.gguf", "nothing", str(tmp_path / "x")):
        assert "no such file or folder; allowed: " in refusal(text)
    with pytest.raises(CheckpointError, match="no such file or folder; allowed"):
        find_model(Path("Qwen/x"))
    assert hub.asked == []


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("says\nso", response=response)


class DroppedError(Exception):
    """What some transport raises, of a class of its own."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.RepositoryNotFoundError, 401), "no such repository"),
        (http_error(errors.HfHubHTTPError, 401), "no such repository"),
        (http_error(errors.GatedRepoError, 403), "gated; allowed: an account"),
        (http_error(errors.RevisionNotFoundError, 404), "no revision 'v9'; allowed: a branch"),
        (errors.LocalEntryNotFoundError("x\ny"), "not whole in the cache, and no network"),
        (errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (RuntimeError("IO Error: No space left on device (os error 28)"), "disk is full"),
        (
            http_error(errors.HfHubHTTPError, 500),
            "download failed: HfHubHTTPError: says so; allowed: the same",
        ),
        (DroppedError("peer closed connection"), "download failed: DroppedError: peer closed"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_errors_are_one_line(error: Exception, words: str, hub: Hub) -> None:
    hub.answer = error
    message = refusal("a/b@v9")
    assert message.startswith("a/b@v9: no such file or folder here; on the Hugging Face hub: ")
    assert re.search(words, message), message


def test_a_command_prints_one_line(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.answer = http_error(errors.RepositoryNotFoundError, 401)
    assert main(["bench", "--no-results", "--model", "a/b"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "no such repository" in captured.err


def test_an_interrupt_stays_one(hub: Hub) -> None:
    hub.answer = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        find_model("a/b")


def test_a_cached_model_needs_no_network(cache: Path, folder: Path) -> None:
    snapshot = add_to_cache(cache, "Qwen/Qwen2.5-tiny", folder)
    for text in ("Qwen/Qwen2.5-tiny", "Qwen/Qwen2.5-tiny@main", f"Qwen/Qwen2.5-tiny@{COMMIT}"):
        assert find_model(text) == snapshot
    model = load_model("Qwen/Qwen2.5-tiny")
    assert model.name == "Qwen2.5-tiny" == repository_name(snapshot)
    assert model.config.model_type == "qwen2"
    assert "no network" in refusal("Qwen/Qwen2.5-tiny@other")
    assert "no network" in refusal("Qwen/other")


def test_a_cached_file(
    cache: Path, tmp_path: Path, make_qwen2: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_gguf(source / "tiny-q8_0.gguf", make_qwen2(), "Q8_0")
    snapshot = add_to_cache(cache, "a/b-GGUF", source)
    assert find_model("a/b-GGUF:tiny-q8_0.gguf") == snapshot / "tiny-q8_0.gguf"
    assert load_model("a/b-GGUF:tiny-q8_0.gguf").name == "tiny"
    assert "other.gguf is neither" in refusal("a/b-GGUF:other.gguf")
    assert "a/b-GGUF:FILE.gguf" in refusal("a/b-GGUF")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "shard", "index", "blob"])
def test_what_is_cached_in_part_is_not_taken_for_a_model(
    name: str, cache: Path, folder: Path
) -> None:
    snapshot = add_to_cache(cache, "a/b", folder)
    shards = sorted(snapshot.glob("*.safetensors"))
    index = snapshot / "model.safetensors.index.json"
    if name == "shard":
        shards[1].unlink()
    elif name == "index":
        index.unlink()
    elif name == "blob":
        shards[0].resolve().unlink()
    else:
        (snapshot / name).unlink()
    message = refusal("a/b")
    missing = {"shard": shards[1].name, "blob": shards[0].name, "index": index.name}
    assert missing.get(name, name) in message


def test_only_pickled_weights(cache: Path, folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))
    add_to_cache(cache, "a/b", folder)
    assert "a/b: no safetensors in the repository; allowed: " in refusal("a/b")


def test_paths_do_not_import_the_library(folder: Path) -> None:
    code = (
        "import sys, tilewright.models\n"
        f"tilewright.models.find_model({str(folder)!r})\n"
        "print([name for name in ('huggingface_hub', 'torch') if name in sys.modules])\n"
        "try:\n"
        "    tilewright.models.find_model('a/b')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)},
    )
    assert done.stdout.splitlines() == ["[]", "CheckpointError False"]
    assert done.stderr == ""
