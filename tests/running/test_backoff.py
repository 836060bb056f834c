"""Pauses before restarts."""

from __future__ import annotations

from mqtemplate.running.supervisor import RestartBackoff


def test_the_pause_doubles_up_to_half_a_minute() -> None:
    backoff = RestartBackoff()

    assert [backoff.ended(now=0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_worker_that_was_ready_for_a_minute_starts_again_at_once() -> None:
    backoff = RestartBackoff()
    pauses = [backoff.ended(0), backoff.ended(0)]

    backoff.ready(now=100)
    soon = backoff.ended(now=159)
    backoff.ready(now=200)
    late = backoff.ended(now=260)

    assert (*pauses, soon, late) == (0.5, 1, 2, 0.5)


def test_new_code_begins_with_the_first_pause() -> None:
    backoff = RestartBackoff()
    backoff.ended(0)

    backoff.reset()

    assert backoff.ended(0) == 0.5
