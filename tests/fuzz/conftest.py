"""A folder that the fuzz tests share, and the long form of them.

``pytest tests/fuzz --hypothesis-profile=campaign`` takes some minutes; `make test-slow` ends
with it.
"""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("campaign", deadline=None, max_examples=300)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the examples of a test write over one another."""
    return tmp_path_factory.mktemp("fuzz")
