"""A group member in a process of its own, which a test kills.

``python -m tests.brokers.remote.member_process <name server> <group> <topic>`` prints ``joined``, and then the body of
each message on a line. It commits nothing.
"""

from __future__ import annotations

import sys

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from tests.brokers.remote.clients import join


def main(address: str, group: str, topic: str) -> None:
    with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        member = join(broker, topic, group)
        print("joined", file=sys.__stdout__, flush=True)
        while True:
            for message in member.poll(32, 1_000):
                print(message.body.decode(), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
