"""A tokenizer's components, and their Hugging Face directory form.

Encoding and GGUF are in other files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tilewright.errors import CheckpointError, TilewrightError, one_line
from tilewright.models.checkpoints.json_file import read_json
from tilewright.models.tokenizer.tokenizer_limits import check_costs
from tilewright.utils.files import read_regular

# End-of-turn tokens of instruction-tuned models. They count if the template contains them.
CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The components of a tokenizer.

    Attributes:
        where: Source for messages.
        backend: The library's tokenizer.
        special_tokens: Named tokens (``bos_token`` ...) for chat templates.
        eos_ids: End tokens.
        chat_template: The template's source. None: none.
        add_bos: Add the first token. None: the backend's post-processor decides.
        add_eos: Add the end token. None: the backend's post-processor decides.
    """

    where: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]
    chat_template: str | None
    add_bos: bool | None = None
    add_eos: bool | None = None


@contextlib.contextmanager
def library_errors(kind: type[TilewrightError], where: str) -> Iterator[None]:
    """Convert the tokenizers library's errors to ``kind``, with ``where`` as prefix.

    The library raises plain Exception. A panic in its Rust code is not even an Exception.
    """
    try:
        yield
    except TilewrightError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{where}: {one_line(error)}") from None


def read_folder(folder: Path) -> Vocabulary:
    """Read a directory's tokenizer: ``tokenizer.json`` and further files known to transformers.

    Raises:
        CheckpointError: A file is missing or corrupt, or files contradict each other.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: the tokenizer is missing; allowed: a folder that has one")
    backend = _parse(path)
    backend.no_truncation()
    backend.no_padding()
    config = _optional_json(folder / "tokenizer_config.json")
    where = folder / "tokenizer_config.json"
    with library_errors(CheckpointError, f"{where}: not the tokens of a tokenizer"):
        _add_listed_tokens(backend, config, where)
        named = _named_tokens(backend, config)
    template = _folder_template(folder, config)
    return Vocabulary(
        where=folder,
        backend=backend,
        special_tokens=named,
        eos_ids=collect_eos(
            backend,
            _folder_eos(folder),
            eos_token=named.get("eos_token"),
            template=template,
        ),
        chat_template=template,
        add_bos=_flag(config, "add_bos_token", "add_eos_token"),
        add_eos=_flag(config, "add_eos_token", "add_bos_token"),
    )


def write_folder(vocabulary: Vocabulary, folder: Path) -> None:
    """Write files for `read_folder` and transformers into a new or empty ``folder``.

    ``tokenizer.json`` is written last and is required, so a failure leaves no valid directory.

    Raises:
        CheckpointError: The directory is not empty, or cannot be written.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **vocabulary.special_tokens,
    }
    if vocabulary.add_bos is not None or vocabulary.add_eos is not None:
        config["add_bos_token"] = bool(vocabulary.add_bos)
        config["add_eos_token"] = bool(vocabulary.add_eos)
    if vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    files = {
        "tokenizer_config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": list(vocabulary.eos_ids)}),
        "tokenizer.json": vocabulary.backend.to_str(),
    }
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(f"{folder}: holds files; allowed: a new or empty folder")
        for name, text in files.items():
            written.append(folder / name)
            written[-1].write_text(text, encoding="utf-8")
    except BaseException as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            raise CheckpointError(
                f"{folder}: cannot be written: {reason}; allowed: a writable folder"
            ) from None
        raise


def collect_eos(
    backend: tokenizers.Tokenizer,
    ids: Iterable[int],
    *,
    eos_token: str | None,
    template: str | None,
) -> tuple[int, ...]:
    """Return the end tokens: the given ids, ``eos_token``, and the template's end of a turn."""
    found = list(ids)
    tokens = [] if eos_token is None else [eos_token]
    tokens += [token for token in CHAT_END_TOKENS if token in (template or "")]
    for token in tokens:
        index = backend.token_to_id(token)
        if index is not None:
            found.append(index)
    return tuple(dict.fromkeys(found))


def _parse(path: Path) -> tokenizers.Tokenizer:
    check_costs(read_json(path), path)
    with library_errors(CheckpointError, f"{path}: not a tokenizer"):
        return tokenizers.Tokenizer.from_file(str(path))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], where: Path
) -> None:
    """Add tokens in ``added_tokens_decoder`` that are missing in tokenizer.json."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping):
        raise CheckpointError(
            f"{where}: added_tokens_decoder is no object; allowed: id: {{content: ...}}"
        )
    try:
        found = {int(index): (str(entry["content"]), entry) for index, entry in listed.items()}
        entries = [(index, *found[index]) for index in sorted(found)]
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(
            f"{where}: added_tokens_decoder has another entry; allowed: id: {{content: ...}}"
        ) from None
    for index, content, entry in entries:
        if backend.token_to_id(content) is None:
            flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
            options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
            backend.add_tokens([AddedToken(content, **options)])
        if backend.token_to_id(content) != index:
            raise CheckpointError(
                f"{where}: added token {content!r} has id {index}; "
                f"tokenizer.json makes it {backend.token_to_id(content)}; allowed: equal ids"
            )


def _named_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for key in NAMED_TOKENS:
        value = config.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            backend.token_to_id(value)  # raises for invalid Unicode
            named[key] = value
    return named


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return ``chat_template.jinja``, or the (default) template in the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_regular(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; allowed: UTF-8 text") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _folder_eos(folder: Path) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        for index in value if isinstance(value, list) else [value]:
            if index is None:
                continue
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise CheckpointError(
                    f"{folder / name}: eos_token_id = {value!r}; allowed: ids from 0"
                )
            ids.append(index)
    return ids


def _flag(config: Mapping[str, Any], key: str, other: str) -> bool | None:
    """Return a flag that makes transformers rebuild the post-processor, or None if unset."""
    if config.get(key) is None and config.get(other) is None:
        return None
    return bool(config.get(key, False))
