"""Two processes replace messages under the same pending keys while these messages fall due."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import MessageExt
from mqtemplate.pending import PendingQuery
from tests.server import pending_key_process
from tests.server.pending_key_process import TOPIC
from tests.server.process import BrokerProcess
from tests.waiting import PATIENCE_S, eventually

SENDS = 400


def test_each_message_is_either_replaced_once_or_delivered_once(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as server:
        settings = RemoteSettings(name_servers=(str(server.name_server),))
        with RemoteBroker(settings) as broker:
            broker.create_topic(TOPIC, 1)
            senders = [start(str(server.name_server), seed) for seed in (1, 2)]
            results = [json.loads(line) for sender in senders for line in finish(sender)]
            eventually(
                lambda: broker.delayed.count_pending(PendingQuery(topic=TOPIC)).total == 0, "all messages were released"
            )
            delivered = Counter(message.msg_id for message in stored(broker))

    replaced = Counter(msg_id for result in results for msg_id in result["replaced"])
    assert len(results) == 2 * SENDS
    assert replaced + delivered == Counter(result["msg_id"] for result in results)
    assert replaced, "no message was replaced: the test shows nothing"
    assert delivered, "no message was delivered before it was replaced: the test shows nothing"


def start(name_server: str, seed: int) -> subprocess.Popen[str]:
    """Start a sender. It sends when it reads a line."""
    command = [sys.executable, "-m", pending_key_process.__name__, name_server, str(SENDS), str(seed)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert sender.stdin is not None
    sender.stdin.write("go\n")
    sender.stdin.flush()
    return sender


def finish(sender: subprocess.Popen[str]) -> list[str]:
    output, _ = sender.communicate(timeout=PATIENCE_S)
    assert sender.returncode == 0
    return output.splitlines()


def stored(broker: RemoteBroker) -> list[MessageExt]:
    [queue] = broker.queues(TOPIC)
    found: list[MessageExt] = []
    offset, end = 0, broker.reader.max_offset(queue)
    while offset < end:
        result = broker.reader.pull(queue, offset, 32, 0, None)
        found += result.messages
        offset = result.next_begin_offset
    return found
