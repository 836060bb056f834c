"""A server that is killed loses nothing that a client was told is stored."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mqtemplate.errors import BrokerError
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from tests.server.process import BrokerProcess
from tests.server.tool import Tool

SENDERS = 4
ENOUGH = 200


def send_until_it_is_gone(tool: Tool, name: int, acknowledged: list[bytes], enough: threading.Semaphore) -> None:
    """Each of the senders has a queue of its own."""
    number = 0
    while True:
        body = b"%d-%d" % (name, number)
        try:
            tool.send("orders", body, queue_id=name)
        except BrokerError:
            return
        acknowledged.append(body)
        enough.release()
        number += 1


def read_all(tool: Tool, queue_id: int) -> list[bytes]:
    """Every message of a queue."""
    bodies: list[bytes] = []
    at = 0
    while True:
        header = PullMessageRequestHeader(
            consumer_group="reader",
            topic="orders",
            queue_id=queue_id,
            queue_offset=at,
            max_msg_nums=32,
            sys_flag=PullSysFlag.SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=0,
            subscription="*",
            sub_version=0,
        )
        response = tool.request(RequestCode.PULL_MESSAGE, header)
        if response.code != ResponseCode.SUCCESS:
            assert response.code == ResponseCode.PULL_NOT_FOUND, str(response)
            return bodies
        bodies += [message.body for message in decode_messages(response.body, "broker-a")]
        at = response.header(PullMessageResponseHeader).next_begin_offset


@pytest.mark.slow
def test_every_acknowledged_message_is_there_after_sigkill(tmp_path: Path) -> None:
    """Four clients send without a pause; after some hundred responses the server dies, and starts again."""
    acknowledged: list[list[bytes]] = [[] for _ in range(SENDERS)]
    enough = threading.Semaphore(0)
    with BrokerProcess(tmp_path) as broker:
        tools = [Tool(broker.address) for _ in range(SENDERS)]
        tools[0].send("made", b"first")
        threads = [
            threading.Thread(target=send_until_it_is_gone, args=(tool, name, acknowledged[name], enough))
            for name, tool in enumerate(tools)
        ]
        for thread in threads:
            thread.start()
        for _ in range(ENOUGH):
            assert enough.acquire(timeout=30)

        broker.kill()
        for thread in threads:
            thread.join(30)
        for tool in tools:
            tool.close()

    with BrokerProcess(tmp_path) as again, Tool(again.address) as tool:
        found = [read_all(tool, queue_id) for queue_id in range(SENDERS)]

    assert sum(map(len, acknowledged)) >= ENOUGH
    for sent, kept in zip(acknowledged, found, strict=True):
        assert kept[: len(sent)] == sent  # in order; and at most one more, whose response did not arrive
        assert len(kept) <= len(sent) + 1
