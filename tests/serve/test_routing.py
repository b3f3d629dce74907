"""Routing against a plain model with full history and new sums."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tilewright.runtime.memory.pages import chain_keys
from tilewright.serve.engines.routing import ReplicaRouter

NUM, PLENTY, PAGE = 3, 10**6, 4
SLOTS = 3
PROMPTS = st.lists(st.integers(0, 1), max_size=4 * PAGE)


class Routing(RuleBasedStateMachine):
    """Random requests, tokens, ends, lost engines and unusable engines."""

    def __init__(self) -> None:
        super().__init__()
        self.router = ReplicaRouter(NUM)
        self.live: dict[int, tuple[int, int, int, list[int]]] = {}  # engine, to read, to write
        self.held: list[set[bytes]] = [set() for _ in range(NUM)]
        self.next_id = 0

    def loads(self) -> list[int]:
        found = [0] * NUM
        for engine, prompt, answer, _ in self.live.values():
            found[engine] += prompt + answer
        return found

    @rule(
        prompt=PROMPTS,
        answer=st.integers(1, 40),
        usable=st.sets(st.integers(0, NUM - 1)),
        again=st.booleans(),
    )
    def come(self, prompt: list[int], answer: int, usable: set[int], again: bool) -> None:
        like = None
        if again and self.live:
            like, (*_, prompt) = next(iter(self.live.items()))
        keys = chain_keys(prompt, PAGE)
        loads, size = self.loads(), len(prompt) + answer
        self.next_id += 1
        engine = self.router.place(
            self.next_id,
            keys,
            num_prompt=len(prompt),
            num_answer=answer,
            usable=sorted(usable),
            num_slots=SLOTS,
            most_keys=PLENTY,
            like=like,
        )
        if not usable:
            assert engine is None and self.next_id not in self.router
            return
        assert engine in usable
        num_prompt = len(prompt)
        if like is not None and self.live[like][0] in usable:
            assert engine == self.live[like][0]
            num_prompt = 0
        else:
            counts = [sum(each == at for at, *_ in self.live.values()) for each in range(NUM)]
            usable = {each for each in usable if counts[each] < SLOTS} or usable
            assert engine in usable
            depths = {
                each: next((at for at, key in enumerate(keys) if key not in self.held[each]), None)
                for each in usable
            }
            found = {each: len(keys) if depth is None else depth for each, depth in depths.items()}
            least = min(loads[each] for each in usable)
            deepest = max(found.values())
            holders = [each for each in usable if found[each] == deepest]
            load = min(loads[each] for each in holders)
            if deepest and load + size <= 2 * (least + size):
                assert engine in holders and loads[engine] == load
            else:
                assert loads[engine] == least
        self.held[engine] |= set(keys)
        self.live[self.next_id] = (engine, num_prompt, answer, prompt)

    @rule(which=st.integers(0, 100), count=st.integers(1, 50))
    def answer(self, which: int, count: int) -> None:
        if self.live:
            request_id = list(self.live)[which % len(self.live)]
            engine, _, left, prompt = self.live[request_id]
            self.router.advance(request_id, count)
            self.live[request_id] = (engine, 0, max(0, left - count), prompt)

    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        if self.live:
            request_id = list(self.live)[which % len(self.live)]
            assert self.router.leave(request_id) == self.live.pop(request_id)[0]
        assert self.router.leave(-1) is None
        self.router.advance(-1, 5)

    @rule(engine=st.integers(0, NUM - 1))
    def lose(self, engine: int) -> None:
        there = [each for each, known in self.live.items() if known[0] == engine]
        assert self.router.lose(engine) == there
        for request_id in there:
            del self.live[request_id]
        self.held[engine].clear()

    @rule()
    def forget(self) -> None:
        self.router.forget()
        for held in self.held:
            held.clear()

    @invariant()
    def loads_are_those_of_who_is_there(self) -> None:
        assert self.router.loads == self.loads()
        for request_id, known in self.live.items():
            assert request_id in self.router and self.router.engine_of(request_id) == known[0]


TestRouting = Routing.TestCase
TestRouting.settings = settings(TestRouting.settings, stateful_step_count=40)


def placed(router: ReplicaRouter, request_id: int, prompt: list[int], most: int = PLENTY) -> int:
    """Return the engine for a request that ends immediately."""
    engine = router.place(
        request_id,
        chain_keys(prompt, PAGE),
        num_prompt=len(prompt),
        num_answer=8,
        usable=range(2),
        num_slots=SLOTS,
        most_keys=most,
    )
    assert engine is not None and router.leave(request_id) == engine
    return engine


def test_a_prompts_first_pages_are_forgotten_last() -> None:
    router = ReplicaRouter(2)
    long, other = list(range(40)), list(range(100, 108))
    first = placed(router, 1, long, most=6)
    assert placed(router, 2, other, most=6) != first, "the one that was chosen least recently"
    assert placed(router, 3, long[:24], most=6) == first
    for number in range(4, 40):  # other pages evict it from both
        placed(router, number, [200 + number] * 24, most=6)
    assert placed(router, 40, long, most=6) != placed(router, 41, list(range(300, 340)), most=6)


def test_chats_stay_where_their_turns_are_and_the_work_is_even() -> None:
    """64 chats with 8 turns behind a common system prompt."""
    router, chooser = ReplicaRouter(2), random.Random(7)
    system = [1] * 16
    chats = [[*system, *chooser.choices(range(50), k=16)] for _ in range(64)]
    where: list[set[int]] = [set() for _ in chats]
    number, given = 0, [0, 0]
    for _ in range(8):
        asked = []
        for chat, seen in zip(chats, where, strict=True):
            number += 1
            engine = router.place(
                number,
                chain_keys(chat, PAGE),
                num_prompt=len(chat),
                num_answer=16,
                usable=range(2),
                num_slots=64,
                most_keys=PLENTY,
            )
            assert engine is not None
            asked.append(number)
            seen.add(engine)
            given[engine] += len(chat)
            chat += chooser.choices(range(50), k=32)
        for each in asked:
            router.leave(each)
    assert sum(len(seen) == 1 for seen in where) >= 56
    assert max(given) < 2.2 * min(given)


@pytest.mark.parametrize("begins", [0, 37])
def test_no_request_waits_for_a_slot_while_another_engine_has_one(begins: int) -> None:
    """Users equal slots and send a request after each answer.

    Engines are in the middle of answers, and nearly finished requests are little work.
    """
    router, slots, length = ReplicaRouter(2), 8, 50
    left: list[dict[int, int]] = [{}, {}]  # remaining steps per request, by engine
    number = waiting = 0
    for step in range(2000):
        if step in (0, begins):
            waiting += slots if begins else 2 * slots
        for _ in range(waiting):
            number += 1
            at = router.place(
                number,
                (),
                num_prompt=10,
                num_answer=length,
                usable=range(2),
                num_slots=slots,
                most_keys=PLENTY,
            )
            assert at is not None
            left[at][number] = length + number % 3
            assert len(left[at]) <= slots
        waiting = 0
        for each in left:
            for request_id in list(each):
                router.advance(request_id, 1)
                each[request_id] -= 1
                if not each[request_id]:
                    del each[request_id]
                    router.leave(request_id)
                    waiting += 1
