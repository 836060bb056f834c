"""Commands of the golden scripts about configuration: its sources, and the settings or the error that they give."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from mqtemplate.brokers.grpc.settings import GrpcSettings
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.context import (
    AppSettings,
    check_embedded_support,
    grpc_settings,
    load_settings,
    remote_settings,
    unneeded_keys,
)
from mqtemplate.context.config.masking import is_secret_name, masked_text
from mqtemplate.context.config.tree import ConfigNode
from mqtemplate.context.settings.rocketmq import parse_name_server
from mqtemplate.context.settings.source import PROCESS, CommandLine
from mqtemplate.errors import ConfigurationError, MQTemplateError
from mqtemplate.running.broker_conf import read_broker_conf
from tests.golden import check_script


class ConfigScript:
    """The commands of a script. A source after ``load`` begins another configuration."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment: dict[str, str] = {}
        self._arguments: dict[str, object] | ConfigNode = {}
        self._settings: AppSettings | None = None
        folder.mkdir()

    # --- sources -----------------------------------------------------------------------------------

    def file(self, name: str, text: str) -> None:
        self._begin()
        (self._folder / name).write_text(text, "utf-8")

    def yml(self, text: str) -> None:
        self.file("application.yml", text)

    def env(self, **variables: str) -> None:
        self._begin()
        self._environment |= variables

    def program(self, **keys: str) -> None:
        self._begin()
        assert isinstance(self._arguments, dict)
        self._arguments |= keys

    def broker_conf(self, text: str) -> Iterator[str]:
        """Read a property file of RocketMQ's broker, and print the reasons of the keys that mean nothing."""
        self.file("broker.conf", text)
        try:
            conf = read_broker_conf(self._folder / "broker.conf")
        except ConfigurationError as refused:
            yield from self._lines(refused)
            return
        self._arguments = conf.root
        yield from (f"{name}: {reason}" for name, reason in conf.without_meaning.items())

    def command_line(self, profile: str = "", **keys: str) -> None:
        self._begin()
        PROCESS.given = CommandLine((profile,) if profile else (), keys)

    def _begin(self) -> None:
        if self._settings is not None:
            self._settings, self._environment, self._arguments = None, {}, {}
            PROCESS.given = CommandLine()
            shutil.rmtree(self._folder)
            self._folder.mkdir()

    # --- results -----------------------------------------------------------------------------------

    def load(self, *profiles: str) -> Iterator[str]:
        """Load the sources, again if another configuration follows, and print the error."""
        self._settings = AppSettings()  # a refused configuration has ended too
        environment = None if (self._folder / ".env").exists() else self._environment
        try:
            self._settings = load_settings(self._folder, profiles, environment, self._arguments)
        except ConfigurationError as refused:
            yield from self._lines(refused)

    def show(self, *keys: str) -> Iterator[str]:
        """Print the values of keys with their origins: typed for the library, as read for the application."""
        for key in keys:
            value: Any = self._loaded
            for part in key.split("."):
                value = getattr(value, part.replace("-", "_"), self)
            try:
                if value is self:
                    yield f"{key}: {self._loaded.get(key)!r} ({self._loaded.origin_of(key)})"
                else:
                    yield f"{key}: {value!r} ({self._loaded.origins.of(key)})"
            except ConfigurationError as refused:
                yield from self._lines(refused)

    def profiles(self) -> Iterator[str]:
        origins = self._loaded.origins
        files = ", ".join(Path(file).name for file in origins.files)
        yield f"profiles {origins.profiles}, unmatched {origins.unmatched_profiles}, files {files}"

    def unused(self) -> Iterator[str]:
        for variable, meant in self._loaded.origins.unused_variables.items():
            yield f"{variable}: {meant}"

    def name_servers(self, text: str) -> Iterator[str]:
        """Print what each value of ``rocketmq.name-server`` chooses."""
        for line in text.splitlines():
            try:
                yield f"{line} -> {parse_name_server(line)}"
            except ValueError as refused:
                yield f"{line} -> {refused}"

    def remote(self) -> Iterator[str]:
        """Print the settings of the client of a cluster that differ from the defaults, or why there is none."""
        yield from self._client(remote_settings, RemoteSettings(name_servers=("host:1",)))

    def proxy(self) -> Iterator[str]:
        """Print the settings of the client of a proxy that differ from the defaults, or why there is none."""
        yield from self._client(grpc_settings, GrpcSettings(endpoints="host:1"))

    def receiving(self) -> Iterator[str]:
        """Print the subscription of ``template.receive``."""
        found = self._loaded.rocketmq.receiving
        yield f"{found.group} reads {found.topic}: {found.selector_type.value} {found.selector_expression}"

    def _client(self, settings_of: Callable[[AppSettings], Any], defaults: Any) -> Iterator[str]:
        try:
            found = settings_of(self._loaded)
        except MQTemplateError as refused:
            yield from self._lines(refused)
            return
        for each in fields(found):
            if getattr(found, each.name) != getattr(defaults, each.name):
                yield f"{each.name}: {getattr(found, each.name)!r}"
        if found.credentials is not None:  # whose repr does not show the secret key
            yield f"secret key: {found.credentials.secret_key}"

    def embedded(self) -> Iterator[str]:
        """Print the first key that the embedded broker does not support, and keys that it does not need."""
        try:
            check_embedded_support(self._loaded)
        except MQTemplateError as refused:
            yield from self._lines(refused)
        yield from (f"{key} is not needed: {reason}" for key, reason in unneeded_keys(self._loaded))

    @property
    def _loaded(self) -> AppSettings:
        assert self._settings is not None, "load comes first"
        return self._settings

    def mask(self, text: str) -> Iterator[str]:
        """Print texts without their secrets."""
        for line in text.splitlines():
            shown = masked_text(line)
            assert "hunter2" not in shown
            assert masked_text(shown) == shown
            yield shown

    def names(self, *names: str) -> Iterator[str]:
        """Print which names of keys mean that the value is a secret."""
        yield from (f"{name}: {'secret' if is_secret_name(name) else 'shown'}" for name in names)

    def _lines(self, refused: MQTemplateError) -> list[str]:
        assert "hunter2" not in str(refused), "an error shows a secret"
        return str(refused).replace(str(self._folder), "FOLDER").splitlines()


def check_config_script(script: Path, folder: Path) -> None:
    """Run a script in a folder, and forget the options of the process that it sets."""
    try:
        check_script(script, ConfigScript(folder / "shop"))
    finally:
        PROCESS.given = CommandLine()
