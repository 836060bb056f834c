"""Settings of the interpreter while a process serves others."""

from __future__ import annotations

import gc
import sys

import pytest

from mqtemplate.processes import prompt_threads


def test_objects_of_the_start_are_no_work_for_a_collection_and_all_settings_are_restored() -> None:
    def settings() -> tuple[object, ...]:
        return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()

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
