"""All settings of an application, as one frozen object."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mqtemplate.calls.middlewares import check_middleware, read_middlewares
from mqtemplate.context.config.binding import ContradictionError
from mqtemplate.context.config.configuration import Configuration, Model
from mqtemplate.context.config.placeholders import Found, Placeholders, as_text
from mqtemplate.context.config.schema import field_named, is_section
from mqtemplate.context.config.tree import ConfigOrigins
from mqtemplate.context.settings import features
from mqtemplate.context.settings.broker import (
    DEFAULT_STORE_PATH,
    BrokerSettings,
    ClusterSettings,
    CopySettings,
    ServerSettings,
)
from mqtemplate.context.settings.features import ListenerDefaultSettings, ManagementSettings
from mqtemplate.context.settings.properties import CommaList, Properties, section
from mqtemplate.context.settings.rocketmq import (
    ClusterAddresses,
    EmbeddedStore,
    ProxyAddress,
    RocketMQSettings,
    parse_name_server,
)
from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import absolute_path, expand_home

HAND_OVER = "mqtemplate.hand-over"
"""Section of the old broker of a hand-over."""
_FROM = "mqtemplate.hand_over.from_"


class MQTemplateSettings(Properties):
    """Keys that Spring does not have: the embedded broker, the starters, and the application itself."""

    broker: BrokerSettings = section()
    copy_: CopySettings = section()  # pydantic's models have a method `copy`
    hand_over: features.HandOverSettings = section()
    server: ServerSettings = section()
    cluster: ClusterSettings = section()
    listener: ListenerDefaultSettings = section()
    embedded: features.EmbeddedStarterSettings = section()
    logging: features.LoggingSettings = section()
    management: ManagementSettings = section()
    dashboard: features.DashboardSettings = section()
    schedules: features.SchedulesSettings = section()
    spark: features.SparkSettings = section()
    autoconfigure: features.AutoconfigureSettings = section()
    profiles: features.ProfilesSettings = section()
    middlewares: CommaList = ()
    """Classes of middlewares for all listeners and the template, such as ``[shop.audit.Audit]``, the outermost first;
    see [middlewares](middlewares.md)."""

    @field_validator("middlewares")
    @classmethod
    def _check_middlewares(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            try:
                [found] = read_middlewares(name)
                check_middleware(found)
            except (ValueError, AttributeError):
                raise ValueError(f"must be dotted names of middlewares, such as shop.audit.Audit, got {name}") from None
            except ConfigurationError as exc:
                raise ValueError(f"has a name that is not a middleware: {exc}") from None
        return value

    @property
    def configured_middlewares(self) -> tuple[object, ...]:
        """The middlewares that ``middlewares`` names."""
        return tuple(found for name in self.middlewares for found in read_middlewares(name))


class AppSettings(BaseSettings):
    """Everything that files, environment and arguments set, validated.

    `load_settings` creates it. Created directly (``AppSettings(rocketmq={...})``, keys in snake_case) it reads no file
    and no environment, as a test may need.

    Sections other than the two below belong to the application: `get` returns a key, `bind` reads a section.

    Args:
        keys: All keys that were read, for `get`, `resolve` and `bind`.
        sections: The sections below, as mappings or models.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    rocketmq: RocketMQSettings = section()
    mqtemplate: MQTemplateSettings = section()

    _keys: Configuration | None = PrivateAttr(default=None)
    _prefix: str = PrivateAttr(default="")
    _directory: Path | None = PrivateAttr(default=None)

    def __init__(self, keys: Configuration | None = None, /, **sections: Any) -> None:
        super().__init__(**sections)
        self._keys = keys
        with contextlib.suppress(OSError):  # a deleted one matters only if a path is relative
            self._directory = Path.cwd()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the only source of values, the arguments. `load_settings` has read files and environment by then."""
        return (init_settings,)

    @model_validator(mode="wrap")
    @classmethod
    def _check_broker(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        settings = validate(values)
        is_given = _contains(values, "mqtemplate", "broker", "store_path")
        settings._check_contradictions(is_given or settings.mqtemplate.broker.store_path != DEFAULT_STORE_PATH)
        return settings

    def _check_contradictions(self, has_store_path: bool) -> None:
        """Refuse keys that contradict ``rocketmq.name-server``.

        Args:
            has_store_path: True: the store directory was written, even if it is the default.
        """
        try:
            choice = parse_name_server(self.rocketmq.name_server)
        except ValueError as exc:
            raise ContradictionError(f"{exc}, got {self.rocketmq.name_server!r}", "rocketmq.name_server") from exc
        broker = self.mqtemplate.broker
        old = self.old_broker_choice
        if old is not None:
            self._check_hand_over(old, choice)
        is_of_old = isinstance(old, EmbeddedStore) and old.path is None
        if has_store_path and not is_of_old:
            self._check_store_path(choice, broker.store_path)
        own_limit = self.rocketmq.producer.max_message_size
        if isinstance(choice, EmbeddedStore) and own_limit is not None and own_limit > broker.max_message_size:
            raise ContradictionError(
                f"is {own_limit}, but the broker takes {broker.max_message_size} bytes "
                "at most; raise mqtemplate.broker.max-message-size with it",
                "rocketmq.producer.max_message_size",
            )

    def _check_store_path(self, choice: EmbeddedStore | ClusterAddresses | ProxyAddress, store_path: Path) -> None:
        name_server = self.rocketmq.name_server
        if isinstance(choice, ClusterAddresses | ProxyAddress):
            problem = f"rocketmq.name-server is {name_server!r}, a cluster that keeps its own files"
        elif choice.in_memory:
            problem = f"rocketmq.name-server is {name_server!r}, which keeps no files"
        elif choice.path is not None and choice.path != store_path:
            problem = f"rocketmq.name-server names another folder, {str(choice.path)!r}"
        else:
            return
        raise ContradictionError(
            f"{str(store_path)!r} is given, but {problem}; keep one of the two keys", "mqtemplate.broker.store_path"
        )

    @property
    def old_broker_choice(self) -> EmbeddedStore | ClusterAddresses | None:
        """The broker that the application leaves; None without a hand-over.

        Raises:
            ContradictionError: ``mqtemplate.hand-over.from`` has a form that is not allowed.
        """
        text = self.mqtemplate.hand_over.from_
        if text is None:
            return None
        allowed = "allowed are 'embedded', 'embedded:<folder>', and 'host:port' of a server of this library"
        try:
            old = parse_name_server(text)
        except ValueError as exc:
            raise ContradictionError(f"is {text!r}: {exc}; {allowed}", _FROM) from exc
        if isinstance(old, ProxyAddress):
            raise ContradictionError(
                f"is {text!r}, a proxy of RocketMQ: pending messages move from this library's brokers only; {allowed}. "
                "Between two clusters of RocketMQ let the old one deliver what it has",
                _FROM,
            )
        if isinstance(old, EmbeddedStore) and old.in_memory:
            raise ContradictionError(
                f"is {text!r}, a store that ends with its process, so nothing can be left there; {allowed}", _FROM
            )
        return old

    def _check_hand_over(
        self, old: EmbeddedStore | ClusterAddresses, new: EmbeddedStore | ClusterAddresses | ProxyAddress
    ) -> None:
        """Refuse a hand-over without a new broker, or to the broker that is left.

        Raises:
            ContradictionError: The new broker is missing, in memory, or the old one.
        """
        text, name_server = self.mqtemplate.hand_over.from_, self.rocketmq.name_server
        advice = "set rocketmq.name-server or rocketmq.endpoints to the broker that the application moves to"
        if "name_server" not in self.rocketmq.model_fields_set:
            raise ContradictionError(f"is {text!r}, and no new broker is given; {advice}", _FROM)
        if isinstance(new, EmbeddedStore) and new.in_memory:
            raise ContradictionError(
                f"is {text!r}, and rocketmq.name-server is {name_server!r}: what moved there would end with this "
                f"process; {advice}",
                _FROM,
            )
        if isinstance(old, EmbeddedStore) and isinstance(new, EmbeddedStore):
            is_same = old.path == new.path
        else:
            is_same = not isinstance(old, EmbeddedStore) and not set(old.addresses).isdisjoint(
                getattr(new, "addresses", ())
            )
        if is_same:
            raise ContradictionError(
                f"is {text!r}, and rocketmq.name-server is {name_server!r}: both are one broker; {advice}, or remove "
                "mqtemplate.hand-over if it has moved there already",
                _FROM,
            )

    @property
    def broker_choice(self) -> EmbeddedStore | ClusterAddresses | ProxyAddress:
        """The broker that ``rocketmq.name-server`` chooses."""
        return parse_name_server(self.rocketmq.name_server)

    @property
    def is_embedded(self) -> bool:
        """True if the broker is an embedded one."""
        return isinstance(self.broker_choice, EmbeddedStore)

    @property
    def is_proxy(self) -> bool:
        """True if the broker is reached through RocketMQ 5's proxy, over gRPC."""
        return isinstance(self.broker_choice, ProxyAddress)

    @property
    def store_path(self) -> Path | None:
        """Store directory of the embedded broker; None in memory, and for a cluster."""
        choice = self.broker_choice
        return self.folder_of(choice) if isinstance(choice, EmbeddedStore) else None

    def folder_of(self, choice: EmbeddedStore) -> Path | None:
        """Return the store directory that a choice of the embedded broker means; None in memory."""
        if choice.in_memory:
            return None
        if choice.path is not None:
            return self.absolute(choice.path, "rocketmq.name-server")
        return self.absolute(self.mqtemplate.broker.store_path, "mqtemplate.broker.store-path")

    @property
    def copied_path(self) -> Path | None:
        """The store directory, if it is to be copied; None otherwise, and for the store of a further template."""
        is_copied = self.mqtemplate.copy_.to is not None and self._prefix in ("", HAND_OVER)
        return self.store_path if is_copied else None

    def absolute(self, path: Path, key: str) -> Path:
        """Return a path of these settings from the root: ``~`` is the home directory of the user.

        A relative path starts at the working directory in which the settings were created. A later `os.chdir` has no
        effect, so an application does not write to two folders.

        Args:
            key: The setting with the path, for the error.

        Raises:
            ConfigurationError: The working directory was deleted, or the user has no home directory.
        """
        path = expand_home(path, key)
        return absolute_path(path) if self._directory is None else self._directory / path

    def with_rocketmq(self, rocketmq: RocketMQSettings, prefix: str) -> AppSettings:
        """Return these settings with another section ``rocketmq``, for the broker of a further template.

        Args:
            prefix: Section in which the keys are written, such as ``rocketmq.templates.audit``.
        """
        view = self.model_copy(update={"rocketmq": rocketmq})
        view._prefix = prefix
        return view

    def as_written(self, key: str) -> str:
        """Return a key as errors show it: keys of ``rocketmq`` in the section of a further template."""
        if not self._prefix:
            return key
        return f"{self._prefix}.{key.removeprefix('rocketmq.').removeprefix('producer.')}"

    @property
    def keys(self) -> Configuration | None:
        """All keys that were read; None if these settings were created without files."""
        return self._keys

    @property
    def origins(self) -> ConfigOrigins:
        """Files and profiles that were read, and the origin of each key."""
        return ConfigOrigins() if self._keys is None else self._keys.origins

    def get(self, key: str, default: object = None) -> object:
        """Return the value of any key with its placeholders resolved; *default* if the key has no value."""
        found = self._lookup(key)
        return default if found is None else Placeholders(self._lookup).resolve(*found)

    def origin_of(self, key: str) -> str | None:
        """Return the origin of the value of any key, such as ``application.yml:4``; None if the key has no value."""
        found = self._lookup(key)
        return None if found is None else found[1]

    def resolve(self, text: object, origin: str = "a placeholder in code") -> object:
        """Resolve ``${key:default}`` in a text; return anything else unchanged.

        Raises:
            ConfigurationError: A key has neither value nor default.
        """
        return Placeholders(self._lookup).resolve(text, origin)

    def resolve_text(self, text: str) -> str:
        """Resolve a text to a text: as `resolve`, and the items of a list are joined by commas."""
        value = self.resolve(text)
        return ",".join(map(str, value)) if isinstance(value, list) else as_text(value)

    def bind(self, section: str, model: type[Model]) -> Model:
        """Read a section of the application into a pydantic model, with relaxed keys and the environment.

        Raises:
            ConfigurationError: The section has invalid keys or values; the error lists all with file and line.
        """
        if self._keys is not None:
            return self._keys.bind(section, model)
        try:
            return model()
        except ValidationError as exc:
            keys = ", ".join(f"{section}.{'.'.join(map(str, each['loc']))}" for each in exc.errors())
            raise ConfigurationError(f"these settings were created without a file, and {keys} is required") from None

    def _lookup(self, key: str) -> Found | None:
        """Find a key as files and environment set it; else its default, for ``${rocketmq.producer.group}``."""
        found = None if self._keys is None else self._keys.lookup(key)
        return found or _default_of(self, key.split("."))


def _contains(values: object, *path: str) -> bool:
    """Return True if raw values contain a key. A section that is an object already does not show what was written."""
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _default_of(settings: AppSettings, path: list[str]) -> Found | None:
    value: Any = settings
    for part in path:
        name = field_named(type(value), part) if is_section(type(value)) else None
        if name is None:
            return None
        value = getattr(value, name)
    return None if value is None or is_section(type(value)) else (value, "default")
