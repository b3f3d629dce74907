"""What the native library's environment says, each variable honoured or refused by name."""

from __future__ import annotations

from tilewright.compiler.targets.cpu.native.library import recipe
from tilewright.errors import ConfigError


def uses_large_pages() -> bool:
    """Whether weights may be copied onto large pages: not with ``TILEWRIGHT_LARGE_PAGES=0``.

    Raises:
        ConfigError: for a value that is neither 0 nor 1.
    """
    return _switch("TILEWRIGHT_LARGE_PAGES", True)


def prints_times() -> bool:
    """Whether ``TILEWRIGHT_NATIVE_TIMES=1`` asks for the table when an engine is closed.

    Raises:
        ConfigError: for a value that is neither 0 nor 1.
    """
    return _switch("TILEWRIGHT_NATIVE_TIMES", False)


def check_settings() -> None:
    """Refuse, before anything is read, values that would be refused later.

    Raises:
        ConfigError: for a variable that is neither 0 nor 1.
    """
    uses_large_pages()
    prints_times()


def compiler_words(name: str) -> list[str]:
    """The words of ``CXX`` or ``CXXFLAGS``; none where it is not set.

    Raises:
        ConfigError: for words that are none, or flags that change sums.
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
