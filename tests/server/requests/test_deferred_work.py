"""Work that would block the I/O thread runs in other threads, which send the responses."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import DestinationError
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.worker_pool import HeavyWork
from mqtemplate.server.requests import deferred_work as deferred_work_module
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError
from tests.server.serving import RecordingConnection
from tests.waiting import PATIENCE_S

REQUEST = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, opaque=3)


class QueueingConnection(RecordingConnection):
    """A connection that puts replies into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: queue.Queue[RemotingCommand] = queue.Queue()

    def reply(self, response: RemotingCommand, **more: object) -> None:
        self.arrived.put(response)


@pytest.fixture
def deferred() -> Iterator[DeferredWork]:
    deferred = DeferredWork(SystemClock(), HeavyWork())
    yield deferred
    deferred.close(PATIENCE_S)


@pytest.fixture
def connection() -> QueueingConnection:
    return QueueingConnection()


def test_work_runs_in_another_thread_which_replies(deferred: DeferredWork, connection: QueueingConnection) -> None:
    threads = []

    def work() -> RemotingCommand:
        threads.append(threading.current_thread())
        return REQUEST.response()

    assert deferred.run(connection, REQUEST, work) is None  # type: ignore[arg-type]

    assert connection.arrived.get(timeout=PATIENCE_S).code == ResponseCode.SUCCESS
    assert threads != [threading.current_thread()]


def test_deferred_work_is_not_a_request_of_the_io_thread(connection: QueueingConnection) -> None:
    """Else producers of long batches would have the thread of their batches rest, each for the other."""
    heavy = HeavyWork()
    deferred = DeferredWork(SystemClock(), heavy)
    heavy.count_inline()  # as the server counts a request before it passes it to its processor

    deferred.run(connection, REQUEST, REQUEST.response)  # type: ignore[arg-type]
    connection.arrived.get(timeout=PATIENCE_S)
    deferred.close(PATIENCE_S)

    assert heavy.inline_requests == 0


@pytest.mark.parametrize(
    ("error", "code", "remark"),
    [
        (DestinationError("no such name"), ResponseCode.INVALID_PARAMETER, "no such name"),
        (ZeroDivisionError("by zero"), ResponseCode.SYSTEM_ERROR, "ZeroDivisionError: by zero"),
    ],
)
def test_an_error_in_the_work_becomes_a_response(
    deferred: DeferredWork, connection: QueueingConnection, error: Exception, code: int, remark: str
) -> None:
    def work() -> RemotingCommand:
        raise error

    deferred.run(connection, REQUEST, work)  # type: ignore[arg-type]

    response = connection.arrived.get(timeout=PATIENCE_S)
    assert (response.code, response.remark, response.opaque) == (code, remark, 3)


def test_on_a_virtual_clock_work_runs_at_once(connection: QueueingConnection) -> None:
    response = DeferredWork(VirtualClock(), HeavyWork()).run(connection, REQUEST, REQUEST.response)  # type: ignore[arg-type]

    assert response is not None
    assert response.code == ResponseCode.SUCCESS


def test_work_above_the_maximum_is_refused(connection: QueueingConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_work_module, "_MAX_PENDING", 1)
    deferred, gate, started = DeferredWork(SystemClock(), HeavyWork()), threading.Event(), threading.Event()

    def work() -> RemotingCommand:
        started.set()
        gate.wait(PATIENCE_S)
        return REQUEST.response()

    deferred.run(connection, REQUEST, work)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="create a topic or a group are pending already: 1, or") as refused:
        deferred.run(connection, REQUEST, work)  # type: ignore[arg-type]
    started.wait(PATIENCE_S)
    gate.set()
    deferred.close(PATIENCE_S)

    assert refused.value.code == ResponseCode.SYSTEM_BUSY
    assert connection.arrived.get(timeout=PATIENCE_S).code == ResponseCode.SUCCESS


def test_a_burst_of_sends_waits_until_a_slow_disk_has_created_the_topic(
    deferred: DeferredWork, connection: QueueingConnection
) -> None:
    """Producers in Go and Java send on without waiting, and a refused one-way message is lost."""
    gate = threading.Event()

    def create() -> RemotingCommand:
        gate.wait(PATIENCE_S)
        return REQUEST.response()

    for work in (create, *[REQUEST.response] * 5_000):
        deferred.run(connection, REQUEST, work)  # type: ignore[arg-type]
    gate.set()

    codes = {connection.arrived.get(timeout=PATIENCE_S).code for _ in range(5_001)}
    assert codes == {ResponseCode.SUCCESS}


def test_after_close_work_is_refused(deferred: DeferredWork, connection: QueueingConnection) -> None:
    deferred.close(PATIENCE_S)

    with pytest.raises(RefusedError, match="the server is stopping") as refused:
        deferred.run(connection, REQUEST, REQUEST.response)  # type: ignore[arg-type]

    assert refused.value.code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_the_request_of_a_closed_connection_is_dropped_unless_it_is_one_way(
    deferred: DeferredWork, connection: QueueingConnection
) -> None:
    """Nobody waits for the response. A producer may leave after its last one-way message, though."""
    done: queue.Queue[str] = queue.Queue()
    one_way = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, one_way=True)
    connection.is_open = False

    deferred.run(connection, REQUEST, lambda: done.put("heartbeat"))  # type: ignore[arg-type]
    deferred.run(connection, one_way, lambda: done.put("message"))  # type: ignore[arg-type]

    assert done.get(timeout=PATIENCE_S) == "message"
