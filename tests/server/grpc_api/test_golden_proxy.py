"""This server answers as RocketMQ's proxy 5.5.0 does, except where the difference is named here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.grpc_protos.enums import Code
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.server import BrokerServer
from tests.server.grpc_api.grpc_tool import GrpcTool, create_topic, serving
from tests.server.grpc_api.proxy_probes import PROBES, Answer, World

GOLDEN = json.loads(Path(__file__).with_name("golden_proxy.json").read_text(encoding="utf-8"))

_UNREADABLE = "clients do not repeat a call with an unreadable handle that is refused so"
_REPLACED = "a newer delivery or a change replaced the handle; it must not act on that one"
_UNKNOWN_TOPIC = "a missing topic is named as such"

DIFFERENCES: dict[str, tuple[int | str, str]] = {
    "Telemetry: an unknown group": (Code.OK, "the group is created, as groups of remoting clients are"),
    "Telemetry: an SQL expression that cannot be parsed": ("INVALID_ARGUMENT", "SQL is parsed when it is reported"),
    "SendMessage: an unknown topic": (Code.TOPIC_NOT_FOUND, _UNKNOWN_TOPIC),
    "SendMessage: a deliver time in two days": (Code.OK, "this server has other limits for delays"),
    "ReceiveMessage: no wait time": (Code.MESSAGE_NOT_FOUND, "the answer comes before the deadline"),
    "ReceiveMessage: an SQL expression that cannot be parsed": (
        Code.ILLEGAL_FILTER_EXPRESSION,
        "the filter is what is wrong",
    ),
    "ReceiveMessage: an unknown topic": (Code.TOPIC_NOT_FOUND, _UNKNOWN_TOPIC),
    "ReceiveMessage: a client without settings": (Code.MESSAGE_NOT_FOUND, "the settings of the group are enough"),
    "AckMessage: an unreadable handle": (Code.INVALID_RECEIPT_HANDLE, _UNREADABLE),
    "AckMessage: a handle of another broker": (Code.BAD_REQUEST, "it cannot be acknowledged here"),
    "AckMessage: a handle that a change replaced": (Code.INVALID_RECEIPT_HANDLE, _REPLACED),
    "ChangeInvisibleDuration: an unreadable handle": (Code.INVALID_RECEIPT_HANDLE, _UNREADABLE),
    "ChangeInvisibleDuration: a handle that a change replaced": (Code.INVALID_RECEIPT_HANDLE, _REPLACED),
    "ChangeInvisibleDuration: an acknowledged handle": (Code.INVALID_RECEIPT_HANDLE, _REPLACED),
    "ForwardMessageToDeadLetterQueue: an unreadable handle": (Code.INVALID_RECEIPT_HANDLE, _UNREADABLE),
    "EndTransaction: a second commit": (Code.OK, "it has ended with the same outcome"),
    "RecallMessage: an unknown topic": (Code.TOPIC_NOT_FOUND, _UNKNOWN_TOPIC),
    "SyncLiteSubscription: a topic that is not LITE": (Code.NOT_IMPLEMENTED, "this server has no lite topics"),
}
"""Call -> code of this server, and why it differs from the code of RocketMQ's proxy."""


_WAITING = [
    f"{each['call']}: {each['input']}"
    for each in GOLDEN
    if each["code"] in {Code.MESSAGE_NOT_FOUND, "DEADLINE_EXCEEDED"}
]
"""Receives without a message. A server answers them after five seconds or more, so they run at the same time."""


class _Creator:
    """Creates topics and groups in a server of the same process."""

    def __init__(self, server: BrokerServer[Any]) -> None:
        self._server = server

    def create_topic(self, topic: str, message_type: str = "") -> object:
        return create_topic(self._server, topic, message_type or None)

    def create_group(self, group: str, *, ordered: bool = False) -> object:
        self._server.groups.put([SubscriptionGroupConfig(group_name=group, consume_message_orderly=ordered)])
        return group


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Answer]]:
    """The answers of this server to all calls."""
    with serving() as server:
        world = World(lambda client_id: GrpcTool(server, client_id), _Creator(server), "golden-")
        found = {name: probe.answer(world) for name, probe in PROBES.items() if name not in _WAITING}
        with ThreadPoolExecutor(len(_WAITING)) as pool:
            waiting = {name: pool.submit(PROBES[name].answer, world) for name in _WAITING}
        yield found | {name: answer.result() for name, answer in waiting.items()}
        world.close()


def test_the_table_has_each_call() -> None:
    assert [f"{each['call']}: {each['input']}" for each in GOLDEN] == list(PROBES)


@pytest.mark.parametrize("recorded", GOLDEN, ids=lambda each: f"{each['call']}: {each['input']}")
def test_the_code_is_that_of_the_proxy(recorded: dict[str, Any], answers: dict[str, Answer]) -> None:
    name = f"{recorded['call']}: {recorded['input']}"
    expected, reason = DIFFERENCES.get(name, (recorded["code"], ""))

    assert answers[name].code == expected, f"{answers[name].message}; the proxy: {recorded['message']}; {reason}"


def test_each_difference_is_one() -> None:
    """A difference that is gone is removed from the list."""
    codes = {f"{each['call']}: {each['input']}": each["code"] for each in GOLDEN}

    assert {name for name, (code, _) in DIFFERENCES.items() if codes[name] == code} == set()
    assert {code for code, _ in DIFFERENCES.values() if isinstance(code, int)} <= {int(code) for code in Code}
