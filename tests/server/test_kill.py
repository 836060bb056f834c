"""A killed server loses no acknowledged message."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mqtemplate.errors import BrokerError
from mqtemplate.message import INTERNAL_PROPERTIES
from mqtemplate.remoting.identity import Credentials
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from tests.server.process import BrokerProcess
from tests.server.tool import Tool, pull_header, send_header

PRODUCERS = 4
MIN_MESSAGES = 200


def send_until_killed(tool: Tool, queue_id: int, acknowledged: list[bytes], count: threading.Semaphore) -> None:
    """Send messages to one queue until the server is gone."""
    number = 0
    while True:
        body = b"%d-%d" % (queue_id, number)
        try:
            tool.send("orders", body, queue_id=queue_id)
        except BrokerError:
            return
        acknowledged.append(body)
        count.release()
        number += 1


def read_all(tool: Tool, queue_id: int) -> list[bytes]:
    """Return the bodies of all messages of a queue."""
    bodies: list[bytes] = []
    at = 0
    while True:
        header = pull_header(
            "orders", at, group="reader", queue_id=queue_id, suspend_timeout_millis=0, subscription="*"
        )
        response = tool.request(RequestCode.PULL_MESSAGE, header)
        if response.code != ResponseCode.SUCCESS:
            assert response.code == ResponseCode.PULL_NOT_FOUND, str(response)
            return bodies
        bodies += [message.body for message in decode_messages(response.body, "broker-a")]
        at = response.header(PullMessageResponseHeader).next_begin_offset


@pytest.mark.slow
def test_every_acknowledged_message_survives_sigkill(tmp_path: Path) -> None:
    """Four producers send without a pause. After some hundred responses the server is killed and started again."""
    acknowledged: list[list[bytes]] = [[] for _ in range(PRODUCERS)]
    count = threading.Semaphore(0)
    with BrokerProcess(tmp_path) as broker:
        tools = [Tool(broker.address) for _ in range(PRODUCERS)]
        tools[0].send("created", b"first")
        threads = [
            threading.Thread(target=send_until_killed, args=(tool, queue_id, acknowledged[queue_id], count))
            for queue_id, tool in enumerate(tools)
        ]
        for thread in threads:
            thread.start()
        for _ in range(MIN_MESSAGES):
            assert count.acquire(timeout=30)

        broker.kill()
        for thread in threads:
            thread.join(30)
        for tool in tools:
            tool.close()

    with BrokerProcess(tmp_path) as again, Tool(again.address) as tool:
        found = [read_all(tool, queue_id) for queue_id in range(PRODUCERS)]

    assert sum(map(len, acknowledged)) >= MIN_MESSAGES
    for sent, stored in zip(acknowledged, found, strict=True):
        assert stored[: len(sent)] == sent  # in order
        assert len(stored) <= len(sent) + 1  # The response to one more message may have been lost.


def test_no_message_of_an_account_keeps_a_killed_broker_from_starting_again(tmp_path: Path) -> None:
    """Flags and properties with a meaning inside the broker are masked. The doctor opens the folder as well."""
    rights = "topic-perms: {orders: PUB|SUB}, group-perms: {reader: SUB}"
    accounts = f"[{{access-key: attacker, secret-key: a-secret-key, {rights}}}]"
    (tmp_path / "application.yml").write_text(
        f"mqtemplate: {{server: {{acl: {{enabled: true, accounts: {accounts}}}}}}}"
    )
    credentials = Credentials(access_key="attacker", secret_key="a-secret-key")
    forged = dict.fromkeys(sorted(INTERNAL_PROPERTIES - {"TIMER_DEL_UNIQKEY"}), "garbage")

    with BrokerProcess(tmp_path) as process:
        with Tool(process.address, credentials) as tool:
            for bit in range(31):
                header = replace(send_header("orders", properties=forged), sys_flag=1 << bit)
                assert tool.request(RequestCode.SEND_MESSAGE_V2, header, b"x").code == ResponseCode.SUCCESS
        process.kill()
    doctor = [sys.executable, "-m", "mqtemplate", "doctor", str(tmp_path / "store")]
    examined = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True, check=False)
    with BrokerProcess(tmp_path) as process, Tool(process.address, credentials) as tool:
        bodies = read_all(tool, 0)

    assert examined.returncode == 0, examined.stdout + examined.stderr
    assert bodies == [b"x"] * 31
