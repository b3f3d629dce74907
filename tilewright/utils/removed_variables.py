"""Environment variables of earlier versions. They have no effect and are refused."""

from __future__ import annotations

import os

from tilewright.errors import ConfigError

REMOVED_VARIABLES = (
    "TILEWRIGHT_CUDA_TRIALS",
    "TILEWRIGHT_NATIVE_KERNELS",
    "TILEWRIGHT_TYPED",
)


def check_environment() -> None:
    """Refuse variables without an effect.

    Raises:
        ConfigError: for an environment that sets a removed variable.
    """
    for name in REMOVED_VARIABLES:
        if os.environ.get(name):
            raise ConfigError(f"{name}: this switch no longer exists; allowed: unset it")
