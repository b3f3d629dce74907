"""Torch's own threads come back, whatever happened meanwhile."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.interface.threads import single_torch_thread


def test_threads_come_back() -> None:
    torch.set_num_threads(2)
    with single_torch_thread():
        assert torch.get_num_threads() == 1
        with single_torch_thread():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="in between"), single_torch_thread():
        raise ValueError("in between")
    assert torch.get_num_threads() == 2
