"""Futures: with the private parts of CPython that they save time by, and without them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from structlog.testing import capture_logs

from mqtemplate.futures import _PortableFuture, _SmallFuture, has_known_parts
from tests.waiting import PATIENCE_S

both = pytest.mark.parametrize("create", [_SmallFuture, _PortableFuture])
Create = Callable[[], "Future[int]"]


def test_futures_of_this_python_have_the_parts_that_ours_rest_on() -> None:
    """If it fails on a new version of Python, futures work all the same, and are slower: see `_SmallCondition`."""
    assert has_known_parts(Future())


@pytest.mark.parametrize("change", [{"_lock": object()}, {"_state": 0}])
def test_a_future_with_other_parts_is_not_replaced(change: dict[str, object]) -> None:
    future: Future[int] = Future()
    vars(future).update(change)

    assert not has_known_parts(future)


@both
def test_a_result_is_seen_by_threads_and_callbacks(create: Create) -> None:
    future, seen = create(), []
    future.add_done_callback(lambda done: seen.append(("before", done.result())))
    threading.Timer(0.01, future.set_result, (7,)).start()

    assert future.result(PATIENCE_S) == 7
    future.add_done_callback(lambda done: seen.append(("after", done.result())))
    assert seen == [("before", 7), ("after", 7)]
    assert concurrent.futures.wait([future], PATIENCE_S).done == {future}


@both
def test_a_wait_may_end_before_the_result_and_a_future_may_be_cancelled(create: Create) -> None:
    future, seen = create(), []
    future.add_done_callback(seen.append)
    with pytest.raises(TimeoutError):
        future.result(0.001)

    assert future.cancel()
    assert seen == [future]
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


@both
def test_whatever_a_callback_raises_is_logged_and_the_others_are_called(create: Create) -> None:
    future, seen = create(), []

    def fail(_: object) -> None:
        raise SystemExit("no")

    future.add_done_callback(fail)
    future.add_done_callback(seen.append)
    with capture_logs() as logs:
        future.set_exception(ValueError("lost"))
        future.add_done_callback(fail)

    assert seen == [future]
    assert [log["error"] for log in logs] == ["SystemExit: no"] * 2
