"""Options of one run of an application, as its processes pass them on."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqtemplate.context.application import MQApplication
from mqtemplate.context.config.command_line import PROCESS, CommandLine
from mqtemplate.context.config.env_file import read_env_file
from mqtemplate.errors import ConfigurationError
from mqtemplate.running.target import import_application


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``mqtemplate run`` that each process of the application needs.

    Attributes:
        target: Name of the application, ``module:attribute``.
        profiles: Active profiles; empty for those of the configuration.
        env_file: File with environment variables; those of the process win.
        listeners: Names of the listeners to run; empty for all.
        name_server: Broker instead of that of the configuration.
    """

    target: str
    profiles: tuple[str, ...] = ()
    env_file: str | None = None
    listeners: tuple[str, ...] = ()
    name_server: str | None = None

    def to_json(self) -> str:
        """Return the options as one argument of a command."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        """Return the options that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    def load(self) -> MQApplication:
        """Import the application with these options in force. This process belongs to it from now on.

        Raises:
            ConfigurationError: The file of variables is invalid, or the program ignores the chosen broker.
            DependencyError: There is no such application.
        """
        if self.env_file is not None:
            for name, value in read_env_file(Path(self.env_file)).items():
                os.environ.setdefault(name, value)
        PROCESS.given = CommandLine(self.profiles, self._keys())
        app = import_application(self.target)
        if self.name_server is not None and app.settings.rocketmq.name_server != self.name_server:
            raise ConfigurationError(
                f"{self.target} was created with finished settings, so it would use the broker "
                f"{app.settings.rocketmq.name_server!r} and not {self.name_server!r}; create it with "
                "load_settings(...), or from application.yml"
            )
        return app

    def _keys(self) -> dict[str, object]:
        keys: dict[str, object] = {"mqtemplate.listener.enabled": True}
        if self.name_server is not None:
            keys["rocketmq.name-server"] = self.name_server
        if self.listeners:
            keys["mqtemplate.listener.only"] = list(self.listeners)
        return keys
