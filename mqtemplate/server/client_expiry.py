"""Clients that fell silent leave their groups."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from mqtemplate.clock import Clock
from mqtemplate.server.clients import ClientRegistry

_log = structlog.stdlib.get_logger("mqtemplate.server")


class ClientExpiry:
    """Looks every while for clients without a heartbeat.

    Args:
        expire_ms: How long a client may be silent. Source: ``ConsumerManager``, 120 s.
        interval_ms: How often to look.
    """

    name = "server.client_expiry"

    def __init__(self, clients: ClientRegistry, clock: Clock, expire_ms: int, interval_ms: int) -> None:
        self._clients = clients
        self._clock = clock
        self._expire_ms = expire_ms
        self._interval_ms = interval_ms
        self._due_ms = clock.now_ms() + interval_ms

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Nothing comes before its time."""

    def step(self) -> int:
        now_ms = self._clock.now_ms()
        if self._due_ms <= now_ms:
            self._due_ms = now_ms + self._interval_ms
            for channel in self._clients.expire(self._expire_ms):
                _log.warning("server.client_expired", client=channel.client_id, address=str(channel.connection.remote))
                channel.connection.close(f"no heartbeat for {self._expire_ms} ms")
        return self._due_ms
