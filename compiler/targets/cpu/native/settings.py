"""Environment variables of the native library. Invalid values are refused by name."""

from __future__ import annotations

from tilewright.compiler.targets.cpu.native.library import recipe
from tilewright.errors import ConfigError


def uses_large_pages() -> bool:
    """Return false for ``TILEWRIGHT_LARGE_PAGES=0``: weights are not copied to large pages.

    Raises:
        ConfigError: The value is not ``0`` or ``1``.
    """
    return _switch("TILEWRIGHT_LARGE_PAGES", True)


def prints_times() -> bool:
    """Return true for ``TILEWRIGHT_NATIVE_TIMES=1``: a closing engine prints its times.

    Raises:
        ConfigError: The value is not ``0`` or ``1``.
    """
    return _switch("TILEWRIGHT_NATIVE_TIMES", False)


def check_settings() -> None:
    """Check both variables before files are read.

    Raises:
        ConfigError: A value is not ``0`` or ``1``.
    """
    uses_large_pages()
    prints_times()


def compiler_words(name: str) -> list[str]:
    """Return the words of ``CXX`` or ``CXXFLAGS``, none if the variable is not set.

    Raises:
        ConfigError: The value is no list of words, or a flag changes sums.
    """
    try:
        return recipe.words(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _switch(name: str, default: bool) -> bool:
    try:
        return recipe.switch(name, default)
    except ValueError as error:
        raise ConfigError(str(error)) from None
