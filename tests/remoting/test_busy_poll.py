"""Busy polling: while single requests follow each other closely the thread does not sleep, otherwise it does."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqtemplate import processes
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.processes import usable_processors
from mqtemplate.remoting import io_loop
from mqtemplate.remoting.io_loop import BusyPoll
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.running.server import local_cluster
from tests.remoting.wire import EchoServer, RawPeer, echo

_MOMENT_S = 1e-9
"""A poll this long looks for events once."""
_TRIAL, _PAUSE = 32, 512


class _Selector(selectors.DefaultSelector):
    """A selector that records the timeouts of its waits, and sleeps only as long as *events* says there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.timeouts.append(timeout)
        return super().select(0)


@pytest.fixture
def ready() -> Iterator[Callable[[bool], _Selector]]:
    """Make a selector of one socket that has an event, or none."""
    left, right = socket.socketpair()

    def make(has_event: bool) -> _Selector:
        selector = _Selector()
        selector.register(left, selectors.EVENT_READ)
        if has_event:
            right.send(b"!")
        return selector

    with left, right:
        yield make


def test_an_event_that_is_there_is_found_without_sleeping(ready: Callable[[bool], _Selector]) -> None:
    selector = ready(True)
    poll = BusyPoll(selector, _MOMENT_S, lambda: 0)

    for _ in range(10 * _TRIAL):
        assert len(poll.wait(None)) == 1

    assert set(selector.timeouts) == {0}


def test_other_threads_of_the_processor_run_while_it_polls(
    ready: Callable[[bool], _Selector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may put a client's thread on this processor, where it would wait until the poll ends."""
    yields: list[int] = []
    monkeypatch.setattr(io_loop, "_yield", lambda: yields.append(1))
    monkeypatch.setattr(io_loop, "time", SimpleNamespace(monotonic=iter(range(5)).__next__))

    assert BusyPoll(ready(False), 3.5, lambda: 0).wait(0.1) == []

    assert len(yields) == 3


def test_without_an_event_it_sleeps_after_the_poll_with_the_timeout(ready: Callable[[bool], _Selector]) -> None:
    selector = ready(False)

    assert BusyPoll(selector, _MOMENT_S, lambda: 0).wait(1.5) == []

    assert selector.timeouts == [0, 1.5]


def test_after_a_trial_without_events_it_sleeps_at_once_and_tries_again_later(
    ready: Callable[[bool], _Selector],
) -> None:
    selector = ready(False)
    poll = BusyPoll(selector, _MOMENT_S, lambda: 0)

    for _ in range(_TRIAL + _PAUSE + 1):
        poll.wait(None)

    assert selector.timeouts == [0, None] * _TRIAL + [None] * _PAUSE + [0, None]


@pytest.mark.parametrize(("requests", "has_paused"), [(2, False), (3, True)])
def test_it_sleeps_at_once_where_each_wait_brings_several_requests(
    requests: int, has_paused: bool, ready: Callable[[bool], _Selector]
) -> None:
    """Also if polls find events, since more requests are read together after a sleep. It tries again later."""
    selector = ready(True)
    count = 1_000_000  # those before the trial do not matter
    poll = BusyPoll(selector, _MOMENT_S, lambda: count)

    for wait in range(2 * _TRIAL + _PAUSE):
        poll.wait(None)
        count += requests if wait < _TRIAL else 1

    assert selector.timeouts == [0] * _TRIAL + [None if has_paused else 0] * _PAUSE + [0] * _TRIAL


def test_a_time_of_zero_never_polls(ready: Callable[[bool], _Selector]) -> None:
    selector = ready(False)
    poll = BusyPoll(selector, 0, lambda: 0)

    for _ in range(3):
        poll.wait(None)

    assert selector.timeouts == [None] * 3


def test_a_wait_that_must_not_sleep_looks_once(ready: Callable[[bool], _Selector]) -> None:
    selector = ready(False)

    assert BusyPoll(selector, _MOMENT_S, lambda: 0).wait(0) == []

    assert selector.timeouts == [0]


def test_a_server_that_polls_answers_each_request_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    server = EchoServer(RemotingServerSettings(busy_poll_us=1_000))
    server.start()

    try:
        with RawPeer(server.address) as peer:
            bodies = [peer.invoke(echo(b"%d" % number)).body for number in range(3 * _TRIAL)]
    finally:
        server.stop()

    assert bodies == [b"%d" % number for number in range(3 * _TRIAL)]
    assert server.loop._requests() == 3 * _TRIAL


@pytest.mark.parametrize(("flush", "busy_poll_s"), [("ASYNC_FLUSH", 0.00025), ("SYNC_FLUSH", 0.0)])
def test_the_setting_applies_where_a_response_does_not_wait_for_the_disk(
    flush: str, busy_poll_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    values = {"broker": {"flush_disk_type": flush}, "server": {"busy_poll_us": 250}}

    cluster = local_cluster(AppSettings(mqtemplate=values))

    assert cluster.broker.remoting.loop.busy_poll_s == busy_poll_s


@pytest.mark.parametrize(
    ("quota", "processors"),
    [("max 100000\n", 3.0), ("50000 100000\n", 0.5), ("800000 100000\n", 3.0), (None, 3.0)],
    ids=["no limit", "half a processor", "more than there are", "another system"],
)
def test_the_processors_are_limited_by_affinity_and_by_the_quota_of_a_container(
    quota: str | None, processors: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota, encoding="ascii")
    monkeypatch.setattr(processes, "_QUOTA_FILE", file)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {1, 4, 5}, raising=False)

    assert usable_processors() == processors
