"""The tries of one send: which of them are repeated, the class of the error, and the queue that is selected again."""

from __future__ import annotations

import time

import pytest

from mqtemplate.brokers.remote.producing.send_request import SendRequest
from mqtemplate.brokers.remote.producing.tries import Tries
from mqtemplate.errors import (
    BrokerError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendConnectError,
    SendError,
    SendTimeoutError,
)
from mqtemplate.message import MessageQueue, SelectedQueue

REFUSED = RemoteConnectError("refused")
LOST = RemoteConnectError("lost", was_sent=True)
LATE = RemoteTimeoutError("no answer")


def tries(*failures: BrokerError, retries: int = 2) -> tuple[Tries, list[float | None]]:
    request = SendRequest(topic="orders", wire_topic="orders", group="g", body=b"", properties="", msg_ids=("7F00",))
    tries = Tries(request, retries, True, 60_000, time.monotonic() + 60)
    return tries, [tries.pause_s("127.0.0.1:1", failure) for failure in failures]


def test_tries_that_stored_nothing_are_repeated_with_growing_pauses() -> None:
    _, pauses = tries(*[REFUSED] * 20)

    bounds = [0.01, 0.02, 0.04, 0.08, 0.16, *[0.25] * 15]
    assert all(pause is not None and bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))


def test_only_tries_that_may_have_stored_the_message_count() -> None:
    _, pauses = tries(REFUSED, LOST, REFUSED, LATE, REFUSED, LOST)

    assert [pause is None for pause in pauses] == [False, False, False, False, False, True]


@pytest.mark.parametrize(
    ("failures", "kind"),
    [((REFUSED,), SendConnectError), ((LOST, REFUSED), SendConnectError), ((LATE, REFUSED), SendTimeoutError)],
)
def test_a_send_has_timed_out_if_one_of_its_tries_has(failures: tuple[BrokerError, ...], kind: type[SendError]) -> None:
    """The broker that did not answer may have stored the message, whatever happened later."""
    made, _ = tries(*failures)

    assert type(made.error("127.0.0.1:1", failures[-1])) is kind


def test_a_selected_queue_equals_its_queue_and_can_be_selected_again() -> None:
    """Each part of a send uses it as the queue; only a producer whose route has lost it asks for another one."""
    queues = iter([MessageQueue("orders", "broker-b", 1), MessageQueue("orders", "broker-a", 0)])
    selected, plain = SelectedQueue(lambda: next(queues)), MessageQueue("orders", "broker-b", 1)

    assert selected == plain == selected
    assert hash(selected) == hash(plain)
    assert selected not in (MessageQueue("orders", "broker-a", 1), MessageQueue("bills", "broker-b", 1))
    assert repr(selected) == repr(plain)
    assert selected.select() == MessageQueue("orders", "broker-a", 0)
