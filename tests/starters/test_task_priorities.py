"""Levels and slots of the priorities of Django's tasks: they know neither Django nor a broker."""

from __future__ import annotations

import threading

import pytest

from mqtemplate_starter_django.tasks.priorities import PrioritySlots, level_of
from tests.waiting import PATIENCE_S, eventually


@pytest.mark.parametrize(
    ("priority", "level"),
    [
        (100, "highest"),
        (51, "highest"),
        (50, "high"),
        (1, "high"),
        (0, "normal"),
        (-1, "low"),
        (-50, "low"),
        (-51, "lowest"),
        (-100, "lowest"),
    ],
)
def test_each_priority_has_a_level(priority: int, level: str) -> None:
    assert level_of(priority) == level


def test_a_free_slot_goes_to_the_highest_priority_that_waits() -> None:
    slots = PrioritySlots(1)
    ran: list[str] = []

    def task(name: str, priority: int) -> None:
        with slots.slot(priority):
            ran.append(name)

    tasks = [("low", -9), ("first", 5), ("second", 5), ("high", 60)]
    threads = [threading.Thread(target=task, args=each) for each in tasks]
    with slots.slot(0):
        for number, thread in enumerate(threads, 1):
            thread.start()
            eventually(lambda number=number: slots.waiting == number, f"{number} tasks wait")
        assert ran == []
    for thread in threads:
        thread.join(60)

    assert ran == ["high", "first", "second", "low"]


def test_as_many_tasks_run_at_once_as_there_are_slots() -> None:
    slots = PrioritySlots(2)
    both, third = threading.Barrier(3), threading.Event()

    def task() -> None:
        with slots.slot(0):
            both.wait(PATIENCE_S)

    threads = [threading.Thread(target=task) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait(PATIENCE_S)  # two of them are in a slot at the same time
    with slots.slot(0):
        third.set()
    for thread in threads:
        thread.join(60)

    assert third.is_set()


def test_a_task_that_raises_frees_its_slot() -> None:
    slots = PrioritySlots(1)
    with pytest.raises(ValueError, match="of the task"), slots.slot(0):
        raise ValueError("of the task")

    with slots.slot(0):
        assert slots.waiting == 0
