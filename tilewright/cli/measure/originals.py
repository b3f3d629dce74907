"""The original checkpoint for accuracy comparison (``bench --reference``)."""

from __future__ import annotations

from dataclasses import replace

from tilewright.api import load
from tilewright.cli.arguments.bench import RunOptions
from tilewright.errors import ConfigError
from tilewright.loading.source import ModelHandle
from tilewright.models import check_header, find_model
from tilewright.models.checkpoints.calibrated.checkpoint import CalibratedCheckpoint


def with_original(source: ModelHandle, options: RunOptions) -> ModelHandle:
    """Return the source with the named original.

    Raises:
        ConfigError: for calibrated weights without their original, or with another checkpoint.
    """
    checkpoint = None if source.model is None else source.model.checkpoint
    facts = checkpoint.facts if isinstance(checkpoint, CalibratedCheckpoint) else None
    if options.reference is None:
        if facts is not None and options.case.token_accuracy:
            raise ConfigError(
                f"{source.path}: accuracy of calibrated weights; allowed: with --reference PATH, "
                f"the checkpoint of {facts.model} that they were made of"
            )
        return source
    found = find_model(options.reference)
    check_header(found)
    original = load(found)
    if facts is not None and original.content_hash != facts.original:
        raise ConfigError(
            f"--reference {options.reference}: not the checkpoint that {source.path} was "
            f"calibrated from; allowed: content hash {facts.original[:12]}"
        )
    if original.tokenizer.content_hash() != source.tokenizer.content_hash():
        raise ConfigError(
            f"--reference {options.reference}: another tokenizer than that of {source.path}; "
            "allowed: a checkpoint with the same tokenizer"
        )
    return replace(source, original=original)
