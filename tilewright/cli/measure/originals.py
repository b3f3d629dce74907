"""The original checkpoint for accuracy comparison (``bench --reference``)."""

from __future__ import annotations

from dataclasses import replace

from tilewright.api import load
from tilewright.cli.arguments.bench import RunOptions
from tilewright.errors import ConfigError
from tilewright.loading.source import ModelHandle
from tilewright.models import check_header, find_model


def with_original(source: ModelHandle, options: RunOptions) -> ModelHandle:
    """Return the source with the named original.

    Raises:
        ConfigError: Calibrated weights have no original, or another checkpoint.
    """
    _, original_hash = source.calibration
    if options.reference is None:
        if original_hash and options.case.token_accuracy:
            raise ConfigError(
                f"{source.path}: accuracy of calibrated weights; allowed: with --reference PATH, "
                f"the checkpoint of {source.name} that they were made of"
            )
        return source
    found = find_model(options.reference)
    check_header(found)
    original = load(found)
    if original_hash and original.content_hash != original_hash:
        raise ConfigError(
            f"--reference {options.reference}: not the checkpoint that {source.path} was "
            f"calibrated from; allowed: content hash {original_hash[:12]}"
        )
    if original.tokenizer.content_hash() != source.tokenizer.content_hash():
        raise ConfigError(
            f"--reference {options.reference}: its tokenizer differs from {source.path}; "
            "allowed: a checkpoint with the same tokenizer"
        )
    return replace(source, original=original)
