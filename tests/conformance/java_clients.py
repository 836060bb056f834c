"""One version of RocketMQ's Java client, connected to one server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer
from tests.conformance.servers import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A client and its server.

    Attributes:
        version: Version of the client.
        client: The connected client. One JVM serves all tests.
        tools: A client 5.5.0 with RocketMQ's tools.
    """

    server: Server
    version: str
    client: JavaClient
    tools: JavaClient

    @property
    def early_ms(self) -> int:
        """Maximum time by which a timer is early. RocketMQ's timers have slots of one second."""
        return 1_000 if isinstance(self.server, NameServer) else 0

    def topic(self, name: str) -> str:
        """Return the name of a topic that only this version uses."""
        return f"{name}-{self.version.replace('.', '_')}"

    def group(self, name: str) -> str:
        """Return the name of a group that only this version uses."""
        return f"{name}-group-{self.version.replace('.', '_')}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000
