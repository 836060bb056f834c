"""Options of one run of an application, as its processes pass them on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``mqtemplate run`` that each process of the application needs.

    Attributes:
        target: Name of the application, ``module:attribute``.
        profiles: Active profiles; empty for those of the configuration.
        env_file: File with environment variables; those of the process win.
        listeners: Names of the listeners to run; empty for all.
        name_server: Broker instead of that of the configuration.
        access_key: Account of the processes on that broker.
    """

    target: str
    profiles: tuple[str, ...] = ()
    env_file: str | None = None
    listeners: tuple[str, ...] = ()
    name_server: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)

    def to_json(self) -> str:
        """Return the options as one line. An account in them must not get into the arguments of a process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        """Return the options that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    def keys(self) -> dict[str, object]:
        """Return the settings that the options give."""
        keys: dict[str, object] = {"mqtemplate.listener.enabled": True}
        if self.name_server is not None:
            keys["rocketmq.name-server"] = self.name_server
        if self.access_key is not None:
            for section in ("producer", "consumer", "pull-consumer"):
                keys[f"rocketmq.{section}.access-key"] = self.access_key
                keys[f"rocketmq.{section}.secret-key"] = self.secret_key
        if self.listeners:
            keys["mqtemplate.listener.only"] = list(self.listeners)
        return keys
