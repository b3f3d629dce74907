"""Models by name on the Hugging Face hub: ``owner/name``, downloaded into the library's cache.

Only file names are interpreted here. huggingface_hub is imported on first use.
"""

from __future__ import annotations

import errno
import glob
import re
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.huggingface.shards import INDEX, find_shards
from tilewright.models.checkpoints.quantized.config import SIDE_FILES

FORM = "OWNER/NAME[@REVISION][:FILE.gguf] on the Hugging Face hub"
_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^\\:]+))?",
    re.ASCII,
)
_MAX_NAME = 96
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pth", ".pt")
_WANTED = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "*.safetensors", "model.safetensors.index.json"),
    *("preprocessor_config.json", "processor_config.json", *SIDE_FILES),
]
_UNWANTED = ["*/*", "consolidated*"]  # the same weights again, for other programs
_FULL = "No space left on device"  # message of the Rust download library
_CACHE_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, with an optional ``revision`` (None: main branch) and an optional GGUF
    ``file``.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")


def parse_hub_name(text: str) -> HubName | None:
    """Parse a name on the hub. Return None for paths and for invalid names."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    repository, revision, file = match["repository"], match["revision"], match["file"]
    if len(repository) > _MAX_NAME or "--" in repository or ".." in text or "//" in text:
        return None
    if repository.lower().endswith(_FILE_ENDINGS) or not text.isprintable():
        return None
    if revision is not None and (revision[0] in "/-." or revision[-1] in "/."):
        return None
    if file is not None and (file[0] == "/" or not file.lower().endswith(".gguf")):
        return None
    return HubName(repository, revision, file)


def repository_name(folder: Path) -> str | None:
    """Return the ``NAME`` of a cached snapshot's repository, or None for another directory.

    A snapshot's own directory name is a commit hash.
    """
    home = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not home.startswith(_CACHE_PREFIX):
        return None
    return home.rpartition("--")[2] or None


def fetch(name: HubName) -> Path:
    """Return the complete directory or file for ``name`` in the hub's cache. Download missing
    files.

    Without network access, or with HF_HUB_OFFLINE, only the cache is used.

    Raises:
        CheckpointError: The network, repository, revision or file is missing, access is denied, the
            repository has no safetensors, the disk is full, or a download is incomplete.
    """
    from huggingface_hub import snapshot_download

    try:
        # Also for single files: hf_hub_download retries for a long time without network access.
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=_WANTED if name.file is None else [_file_pattern(name.file)],
            ignore_patterns=_UNWANTED if name.file is None else None,
        )
    except Exception as error:  # includes errors from its transport
        where = "no such file or folder here; on the Hugging Face hub"
        raise CheckpointError(f"{name}: {where}: {_reason(error, name)}") from None
    found = Path(folder)
    if name.file is None:
        _check_complete(found, name)
    elif not (found / name.file).is_file():
        raise CheckpointError(
            f"{name}: {name.file} is neither in the repository nor in {found}; allowed: its files"
        )
    return found / (name.file or "")


def _file_pattern(file: str) -> str:
    """Return the pattern for a GGUF file with all its parts."""
    return re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-?????-of-\1", glob.escape(file))


def _check_complete(folder: Path, name: HubName) -> None:
    """Check an offline snapshot. An interrupted program may have left an incomplete snapshot."""
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).is_file():
        raise CheckpointError(
            f"{name}: no safetensors in the repository; allowed: one that has them, or one GGUF "
            f"file of it, {name.repository}:FILE.gguf"
        )
    shards, _ = find_shards(folder)
    for file in ("config.json", "tokenizer.json", *shards):
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{name}: {file} is neither in the repository nor in {folder}; allowed: a "
                "repository that has it, or the network to fetch it"
            )


def _reason(error: Exception, name: HubName) -> str:
    """Return the library's error about ``name`` as a single line."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (
            "the repository is gated; allowed: an account with its terms accepted there, after "
            "`hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return (
            "no such repository; allowed: a public repository, or `hf auth login` for a private one"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision {name.revision!r}; allowed: a branch, tag or commit"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "not whole in the cache, and no network (or HF_HUB_OFFLINE is set); allowed: a "
            "network, or the path of a local copy"
        )
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _FULL in str(error):
        return "the disk is full; allowed: the same command after making room, which continues"
    shown = " ".join(str(error).split())[:200]
    failed = f"the download failed: {type(error).__name__}: {shown}"
    return f"{failed}; allowed: the same command again, which continues"
