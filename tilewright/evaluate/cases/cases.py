"""Named benchmark cases: workload, repeats, prompts and precision.

`check_case` checks a case against a model and a device. Excludes models, tokenizers and targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import ConfigError
from tilewright.utils.registry import Registry

PRECISIONS = ("performance", "accuracy")
DEFAULT_CASE = "performance-batch-1"

# Sizes in the published tables: 128 prompt tokens and 200 output tokens.
TABLE_PROMPT_LENGTH = 128
TABLE_GENERATED_TOKENS = 200

# Token matching prefills 512 tokens and counts the next 512 predictions.
ACCURACY_PREFILL = 512
ACCURACY_CONTEXT = 1024
ACCURACY_TEXT = "accuracy"
"""Default text in `texts/` for accuracy."""

# Reserved length of a natural prompt, with the chat template.
NATURAL_PROMPT_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named benchmark case.

    Attributes:
        name: `<precision>-<workload>`, lower case.
        precision: A configuration's name in `precision_cfgs/`.
        description: One line for `--list`.
        prompts: A file in `demo/sample_prompts` with natural prompts or, with `prompt_length`, a
            file in `tilewright/evaluate/cases/texts` to cut them from.
        prompt_length: Tokens in every prompt. None: natural prompts.
        batch_size: Concurrent users for each replica.
        max_generated_tokens: Maximum output tokens for each user.
        num_repeats: Measured repeats of the whole batch, without the warm-up.
        stop_at_eos: Stop at the model's end token.
        token_accuracy: Measure top-1 and top-5 by teacher forcing.
        data_parallel: Model replica count.
        rotate_prompts: Give every prompt to the next user in each repeat. The output for a prompt
            must be the same each time.

    Raises:
        ConfigError: A count or a prompt length is below 1.
    """

    name: str
    description: str
    precision: str = PRECISIONS[0]
    prompts: str = "questions.json"
    prompt_length: int | None = None
    batch_size: int = 1
    max_generated_tokens: int = TABLE_GENERATED_TOKENS
    num_repeats: int = 3
    stop_at_eos: bool = True
    token_accuracy: bool = False
    data_parallel: int = 1
    rotate_prompts: bool = False

    def __post_init__(self) -> None:
        counts = ("batch_size", "max_generated_tokens", "num_repeats", "data_parallel")
        for field in (*counts, "prompt_length"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"case {self.name!r}: {field} {value}; allowed: 1 or more")

    @property
    def is_natural(self) -> bool:
        """Whether the prompts are questions, not tokens from a text."""
        return self.prompt_length is None

    @property
    def context(self) -> int:
        """Positions for one user. A natural prompt counts as `NATURAL_PROMPT_LENGTH`; its real
        length is checked after tokenization.
        """
        prompt_length = self.prompt_length or NATURAL_PROMPT_LENGTH
        needed = prompt_length + self.max_generated_tokens
        return max(needed, ACCURACY_CONTEXT) if self.token_accuracy else needed


def check_case(case: Case, *, max_context: int, max_data_parallel: int) -> None:
    """Raise an error if the model or the device cannot run a case.

    Args:
        max_context: The model's context in tokens.
        max_data_parallel: Maximum replica count on the device.

    Raises:
        ConfigError: Names the required and the available size.
    """
    if case.context > max_context:
        raise ConfigError(
            f"case {case.name!r} needs a context of {case.context} tokens; "
            f"allowed by this model: {max_context} or fewer"
        )
    if case.data_parallel > max_data_parallel:
        raise ConfigError(
            f"case {case.name!r} needs {case.data_parallel} replicas (data parallel); "
            f"allowed by this device: {max_data_parallel} or fewer"
        )


_Setting = dict[str, Any]
_LONG: _Setting = {"prompts": "long.txt", "stop_at_eos": False}
_TABLE: _Setting = {**_LONG, "prompt_length": TABLE_PROMPT_LENGTH}
_ACCURACY: _Setting = {
    "prompts": f"{ACCURACY_TEXT}.txt",
    "prompt_length": ACCURACY_PREFILL,
    "stop_at_eos": False,
    "token_accuracy": True,
}


def _long_context(k: int) -> tuple[str, _Setting]:
    length = k * 1024
    description = f"one user, a prompt of {length:,} tokens"
    repeats = {} if k == 2 else {"num_repeats": 2}
    return description, {**_LONG, "prompt_length": length, **repeats}


# Templates for every entry of `PRECISIONS`, which completes the name.
_TEMPLATES: Mapping[str, tuple[str, _Setting]] = {
    "batch-1": ("one user, one question", {}),
    "short": (
        "one user, one question, 16 tokens: what an emulated board answers soon",
        {"max_generated_tokens": 16, "num_repeats": 1},
    ),
    "batch-32": ("32 users, 32 questions", {"batch_size": 32}),
    **{f"long-context-{k}k": _long_context(k) for k in (2, 16, 32, 64)},
    "reasoning": (
        "one user, a puzzle, a long answer",
        {"prompts": "reasoning.json", "max_generated_tokens": 4096, "num_repeats": 1},
    ),
    "ci-1": ("one user, 128 tokens in and 200 out: the Performance table", _TABLE),
    "ci-32": (
        "32 users, 128 tokens in and 200 out: the Batch-32 table",
        {**_TABLE, "batch_size": 32},
    ),
    **{
        f"dp-{count}": (
            f"{count} replicas, one user each, 128 tokens in and 200 out",
            {**_TABLE, "data_parallel": count},
        )
        for count in (4, 8)
    },
    "stress": (
        "32 users, long answers, many repeats: memory and stability",
        {**_TABLE, "batch_size": 32, "max_generated_tokens": 500, "num_repeats": 10},
    ),
    "token-matching": (
        "512 tokens in, 512 predictions against the reference: top-1 and top-5",
        {**_ACCURACY, "max_generated_tokens": ACCURACY_CONTEXT - ACCURACY_PREFILL},
    ),
    "top-1": (
        "512 predictions against the reference and nothing else: what a sweep measures",
        {**_ACCURACY, "max_generated_tokens": 1, "num_repeats": 1},
    ),
    "eval-repeat": (
        "32 users, prompts rotated between them: the text of each stays the same",
        {"batch_size": 32, "max_generated_tokens": 100, "rotate_prompts": True},
    ),
    "device-perf": (
        "one user, ten steps: short enough for a profiler",
        {**_TABLE, "max_generated_tokens": 10, "num_repeats": 1},
    ),
}

CASES: Registry[Case] = Registry("case")

for _precision in PRECISIONS:
    for _kind, (_description, _setting) in _TEMPLATES.items():
        _name = f"{_precision}-{_kind}"
        _case = Case(name=_name, description=_description, precision=_precision, **_setting)
        CASES.register(_name, _case)
