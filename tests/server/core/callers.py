"""Clients without a protocol: the core of a server needs of them what `CallerConnection` and `ClientChannel` say."""

from __future__ import annotations

from mqtemplate.engine.clients import ClientNotice
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol import Version
from mqtemplate.server.requests.caller import Caller


class PlainChannel:
    """A client that is an object in this process: a `ClientChannel`, and the connection of its `Caller`.

    Attributes:
        told: The notices that it received.
    """

    def __init__(self, number: int, account: str | None = None) -> None:
        self.id = number
        self.remote = self.remote_address = HostAddress("192.0.2.7", 4_000 + number)
        self.is_open = True
        self.client_id = f"client@{number}"
        self.language = "GO"
        self.version = int(Version.V5_5_0)
        self.last_update_ms = 0
        self.access_key = account
        self.told: list[ClientNotice] = []

    @property
    def is_reachable(self) -> bool:
        return self.is_open

    def caller(self, *, version: int = Version.V5_5_0) -> Caller:
        return Caller(self, self.access_key, version, "SendMessage")

    def tell(self, notice: ClientNotice) -> None:
        self.told.append(notice)

    def close(self, reason: str) -> None:
        self.is_open = False
