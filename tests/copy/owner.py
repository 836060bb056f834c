"""Program that sends as fast as it can, and prints after each message its number and the reported end of its copy."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from mqtemplate.copy import CopiedBroker
from mqtemplate.engine.settings import CopyOptions
from mqtemplate.message import Message, MessageQueue
from tests.copy.recorded import TOPIC, small_settings


def main(folder: str, url: str) -> None:
    """Send until the process is killed."""
    with CopiedBroker(Path(folder), small_settings(), None, copy=CopyOptions(to=url, interval=20)) as broker:
        broker.create_topic(TOPIC, 1)
        queue = MessageQueue(TOPIC, broker.name, 0)
        for number in count():
            broker.sends.send(Message(TOPIC, b"%d" % number), queue)
            # The end first: what is appended meanwhile counts as not copied.
            end = broker.store.end_offset
            copied = max(end - broker.copy_health().lag_bytes, 0)
            print(number + 1, copied, flush=True)


main(*sys.argv[1:])
