"""What the tests with RocketMQ's Java clients share: one case is a version of the client at a server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.peer.java_client import JavaClient
from tests.conformance.servers import Server

__all__ = ["Case", "now_ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A client at a server.

    Attributes:
        version: The client's.
        client: Connected; one JVM for the tests of a module.
        tools: A client 5.5.0, whose tools look at the server too.
        early_ms: How much sooner than its time a timer may come: RocketMQ works in slots of a second, we do not.
    """

    server: Server
    version: str
    client: JavaClient
    tools: JavaClient
    early_ms: int

    def topic(self, name: str) -> str:
        """A topic of its own for this version."""
        return f"{name}-{self.version.replace('.', '_')}"

    def group(self, name: str) -> str:
        return f"{name}-group-{self.version.replace('.', '_')}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000
