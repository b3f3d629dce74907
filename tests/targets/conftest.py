"""What the tests of all targets get: Triton's interpreter where there is no GPU."""

from __future__ import annotations

import torch

from tests.targets import interpreter

if not torch.cuda.is_available():
    interpreter.mend()
    interpreter.hasten()
