"""The named cases of the demo: what is run, how often, on which prompts, with which precision.

A case is only a description; whether a model and a device can run it is asked with `check_case`.
Knows nothing of models, tokenizers or targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import ConfigError
from tilewright.utils.registry import Registry

PRECISIONS = ("performance", "accuracy")
DEFAULT_CASE = "performance-batch-1"

# The timing of the published tables: 128 tokens of prompt, 200 generated.
TABLE_PROMPT_LENGTH = 128
TABLE_GENERATED_TOKENS = 200

# Token matching prefills 512 tokens and counts the 512 predictions from there on.
ACCURACY_PREFILL = 512
ACCURACY_CONTEXT = 1024
ACCURACY_TEXT = "accuracy"
"""The text of `texts/` that an accuracy is of unless another one is named."""

# What a case with natural prompts reserves for each of them, chat template included.
NATURAL_PROMPT_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named load of the demo: prompt length, users, tokens to generate, repeats.

    Attributes:
        name: `<precision>-<what is run>`, lower case.
        precision: the name of a configuration in `precision_cfgs/`.
        description: one line for `--list`.
        prompts: a file of `demo/sample_prompts` with natural prompts, or, where `prompt_length` is
            set, a file of `tilewright/evaluate/cases/texts` to cut them from.
        prompt_length: tokens of every prompt; None for natural prompts.
        batch_size: users served at once, per replica.
        max_generated_tokens: tokens generated for each user, at most.
        num_repeats: measured repeats of the whole batch; warm-up is not one of them.
        stop_at_eos: whether a user ends where the model says so.
        token_accuracy: whether top-1 and top-5 are measured by teacher forcing.
        data_parallel: replicas of the model.
        rotate_prompts: whether each repeat hands every prompt to the next user; the text of a
            prompt must be the same each time.

    Raises:
        ConfigError: a count or a prompt length below 1.
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
        """Whether the prompts are questions to answer, not tokens cut from a text."""
        return self.prompt_length is None

    @property
    def context(self) -> int:
        """Positions that one user needs. A natural prompt counts as `NATURAL_PROMPT_LENGTH`: its
        true length is checked when it is tokenized.
        """
        prompt_length = self.prompt_length or NATURAL_PROMPT_LENGTH
        needed = prompt_length + self.max_generated_tokens
        return max(needed, ACCURACY_CONTEXT) if self.token_accuracy else needed


def check_case(case: Case, *, max_context: int, max_data_parallel: int) -> None:
    """Refuse a case that the model or the device cannot run.

    Args:
        max_context: the model's context in tokens.
        max_data_parallel: replicas that the target's device can hold.

    Raises:
        ConfigError: naming what is needed and what there is.
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


# Each stands once for every precision of `PRECISIONS`, which completes its name.
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
