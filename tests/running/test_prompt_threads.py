"""Settings of the interpreter while a process serves others."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from mqtemplate.processes import FrozenSurvivors, prompt_threads


def test_objects_of_the_start_are_no_work_for_a_collection_and_all_settings_are_restored() -> None:
    def settings() -> tuple[object, ...]:
        return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)

    gc.unfreeze()
    before = settings()

    with prompt_threads():
        assert sys.getswitchinterval() == pytest.approx(0.00005)  # it counts whole microseconds
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 10_000

    assert settings() == before


def test_objects_that_the_program_has_frozen_stay_frozen() -> None:
    gc.freeze()

    with prompt_threads():
        pass

    assert gc.get_freeze_count() > 10_000


class Node:
    """An object in a cycle: only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def survivors() -> Iterator[FrozenSurvivors]:
    """The callback of `prompt_threads`, for few objects."""
    gc.collect()
    gc.freeze()
    survivors = FrozenSurvivors(growth=gc.get_freeze_count() * 2)
    gc.callbacks.append(survivors)
    yield survivors
    gc.callbacks.remove(survivors)
    gc.unfreeze()


@pytest.mark.usefixtures("survivors")
def test_a_full_collection_only_has_the_objects_since_the_last_one() -> None:
    held = [[number] for number in range(1_000)]
    gc.collect()

    assert len(gc.get_objects()) < len(held)

    freed = weakref.ref(Node())
    gc.collect()
    assert freed() is None


@pytest.mark.usefixtures("survivors")
def test_cycles_that_survived_a_collection_are_freed_when_the_objects_have_become_many() -> None:
    """Otherwise a server that creates such cycles would grow for ever."""
    node = Node()
    freed = weakref.ref(node)
    gc.collect()
    del node
    gc.collect()
    assert freed() is not None

    many = [[number] for number in range(gc.get_freeze_count() * 3)]
    gc.collect()  # there are too many now
    gc.collect()

    assert freed() is None
    assert len(gc.get_objects()) < len(many)
