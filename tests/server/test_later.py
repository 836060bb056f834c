"""What takes a while runs beside the I/O thread, and is answered from there, whatever becomes of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import DestinationError
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.server import deferred_work as later_module
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.response import RefusedError
from tests.server.serving import RecordingConnection

REQUEST = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, opaque=3)
SECONDS = 10


class WaitedFor(RecordingConnection):
    """Its replies can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: queue.Queue[RemotingCommand] = queue.Queue()

    def reply(self, response: RemotingCommand, **more: object) -> None:
        self.arrived.put(response)


@pytest.fixture
def later() -> Iterator[DeferredWork]:
    later = DeferredWork(SystemClock())
    yield later
    later.close()


@pytest.fixture
def connection() -> WaitedFor:
    return WaitedFor()


def test_it_runs_in_another_thread_and_answers_from_there(later: DeferredWork, connection: WaitedFor) -> None:
    threads = []

    def work() -> RemotingCommand:
        threads.append(threading.current_thread())
        return REQUEST.response()

    assert later.answer(connection, REQUEST, work) is None  # type: ignore[arg-type]

    assert connection.arrived.get(timeout=SECONDS).code == ResponseCode.SUCCESS
    assert threads != [threading.current_thread()]


@pytest.mark.parametrize(
    ("error", "code", "remark"),
    [
        (DestinationError("no such name"), ResponseCode.INVALID_PARAMETER, "no such name"),
        (ZeroDivisionError("by zero"), ResponseCode.SYSTEM_ERROR, "ZeroDivisionError: by zero"),
    ],
)
def test_an_error_there_is_answered_too(
    later: DeferredWork, connection: WaitedFor, error: Exception, code: int, remark: str
) -> None:
    def work() -> RemotingCommand:
        raise error

    later.answer(connection, REQUEST, work)  # type: ignore[arg-type]

    answer = connection.arrived.get(timeout=SECONDS)
    assert (answer.code, answer.remark, answer.opaque) == (code, remark, 3)


def test_on_a_virtual_clock_it_is_done_at_once(connection: WaitedFor) -> None:
    answer = DeferredWork(VirtualClock()).answer(connection, REQUEST, REQUEST.response)  # type: ignore[arg-type]

    assert answer is not None
    assert answer.code == ResponseCode.SUCCESS


def test_what_is_too_much_is_refused(connection: WaitedFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_module, "_MOST_WAITING", 1)
    later, gate = DeferredWork(SystemClock()), threading.Event()

    def work() -> RemotingCommand:
        gate.wait(SECONDS)
        return REQUEST.response()

    later.answer(connection, REQUEST, work)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="1 requests that make a topic or a group wait already") as refused:
        later.answer(connection, REQUEST, work)  # type: ignore[arg-type]
    gate.set()
    later.close()

    assert refused.value.code == ResponseCode.SYSTEM_BUSY
    assert connection.arrived.get(timeout=SECONDS).code == ResponseCode.SUCCESS


def test_after_the_end_nothing_more_is_taken(later: DeferredWork, connection: WaitedFor) -> None:
    later.close()

    with pytest.raises(RefusedError, match="the server is stopping") as refused:
        later.answer(connection, REQUEST, REQUEST.response)  # type: ignore[arg-type]

    assert refused.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
