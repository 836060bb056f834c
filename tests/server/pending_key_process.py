"""A process that sends messages under a few pending keys, due within milliseconds, and prints what became of each.

Arguments: name server, number of sends, seed. It prints one JSON line for each send, when all are done.
"""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta

from mqtemplate import RocketMQTemplate
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.delay.recall_handle import decode_handle

TOPIC = "reminders"
KEYS = 3


def main(name_server: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    lines = []
    with RemoteBroker(RemoteSettings(name_servers=(name_server,), request_timeout_ms=60_000)) as broker:
        template = RocketMQTemplate(broker)
        sys.stdin.readline()
        for number in range(count):
            delay = timedelta(milliseconds=chance.randrange(1, 8))
            key = f"cart-{chance.randrange(KEYS)}"
            result = template.sync_send(TOPIC, str(number), "60s", delay=delay, pending_key=key)
            replaced = [decode_handle(each).msg_id for each in result.replaced]
            lines.append({"msg_id": result.msg_id, "replaced": replaced})
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
