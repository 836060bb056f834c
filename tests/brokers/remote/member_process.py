"""A member in a process of its own, to be killed: ``python -m tests.brokers.remote.member_process address group topic``.

It says on standard output, a line each, when it has joined and what it was given; it commits nothing.
"""

from __future__ import annotations

import sys

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.selectors.tags import TagSelector


def main(address: str, group: str, topic: str) -> None:
    spec = ConsumerSpec(
        group=group,
        subscriptions={topic: TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        member = broker.subscribe(spec)
        print("joined", file=sys.__stdout__, flush=True)
        while True:
            for message in member.poll(32, 1_000):
                print(message.body.decode(), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
