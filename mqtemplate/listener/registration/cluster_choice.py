"""The cluster of a listener, where its decorator names another one than that of the application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mqtemplate.errors import ListenerError

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """Attributes of a decorator that choose a cluster; empty ones are not given.

    Attributes:
        broker: Name of a further template of the application, whose broker the listener uses.
        name_server: Instead of it, the address of the cluster.
    """

    broker: str = ""
    name_server: str = ""
    access_key: str = ""
    secret_key: str = ""
    tls_enable: bool = False
    namespace: str = ""
    namespace_v2: str = ""
    access_channel: str = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(broker={self.broker!r}, name_server={self.name_server!r})"  # no secrets


_NAMES = tuple(field.name for field in fields(ClusterChoice))


def read_choice(
    listener: str, values: Mapping[str, Any], given: Mapping[str, Any], own_name_server: str
) -> ClusterChoice | None:
    """Return the cluster that a listener chooses; None for that of the application.

    Args:
        values: Attribute -> resolved value.
        given: Attributes that the decorator names. An account of the application is not used for another cluster.
        own_name_server: The name server of the application.

    Raises:
        ListenerError: *broker* and *name_server* are given.
    """
    broker, name_server = values["broker"], values["name_server"]
    if broker and "name_server" in given and name_server:
        raise ListenerError(
            f"{listener}: broker={broker!r} and name_server={name_server!r} both choose a cluster; keep one of the two"
        )
    if not broker and name_server in ("", own_name_server):
        return None
    chosen = {name: values[name] for name in _NAMES if name in given} | {"broker": broker}
    return ClusterChoice(**chosen | ({} if broker else {"name_server": name_server}))
