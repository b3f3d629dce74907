"""The scheduler under any operations in any order, beside a plain model that checks each of them.

A hypothesis state machine draws how many operations of which seed come next, so that what fails is
cut down to few batches; 10^4 operations each time, more in the campaign that is marked slow.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.runtime.plain import Operations

SEEDS = st.integers(0, 1 << 30)


class SchedulerMachine(RuleBasedStateMachine):
    """Batches of operations; the invariants are checked after each operation of a batch."""

    num_operations = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations: Operations | None = None

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        """An executable and a policy."""
        self.operations = Operations(random.Random(seed))

    @rule(seed=SEEDS, count=st.sampled_from((1, 5, 200, 400)))
    def operate(self, seed: int, count: int) -> None:
        """Requests come, are cancelled, steps are launched and read, the device fails."""
        assert self.operations is not None
        self.operations.rng.seed(seed)
        for _ in range(count):
            self.operations.operate()
        SchedulerMachine.num_operations += count

    @rule()
    def drain(self) -> None:
        """Everything returns at idle."""
        assert self.operations is not None
        self.operations.drain()

    def teardown(self) -> None:
        if self.operations is not None and self.operations.num_operations:
            self.operations.drain()


def run(num_examples: int) -> int:
    SchedulerMachine.num_operations = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=30,
            deadline=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return SchedulerMachine.num_operations


def test_ten_thousand_operations_in_any_order() -> None:
    count = 0
    while count < 10_000:
        count += run(5)


@pytest.mark.slow
def test_many_more_operations_in_any_order() -> None:
    count = 0
    while count < 250_000:
        count += run(200)
