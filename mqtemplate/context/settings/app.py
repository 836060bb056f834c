"""All settings of an application, as one frozen, typed object."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, PrivateAttr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mqtemplate.context.config.loaded import ConfigOrigins, LoadedConfig
from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.schema import field_named
from mqtemplate.context.config.tree import UNSET, ConfigNode
from mqtemplate.context.settings.mqtemplate import MQTemplateSettings
from mqtemplate.context.settings.name_server import EmbeddedHome, RemoteCluster, parse_name_server
from mqtemplate.context.settings.properties import ContradictionError
from mqtemplate.context.settings.rocketmq import RocketMQSettings

Model = TypeVar("Model", bound=BaseModel)


class AppSettings(BaseSettings):
    """Everything that files, environment and arguments say, checked.

    Made by `load_settings`. Made by hand (``AppSettings(rocketmq={...})``, keys in snake_case) it reads no file and
    no environment, which is what a test may want.

    Sections other than the two below are the user's own: ask with `get`, or read one into a model with `bind`.
    """

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True, env_prefix=""
    )

    rocketmq: RocketMQSettings = RocketMQSettings()
    mqtemplate: MQTemplateSettings = MQTemplateSettings()

    _config: LoadedConfig = PrivateAttr(default_factory=lambda: LoadedConfig(ConfigNode(), {}, ConfigOrigins()))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed: the stock sources know no relaxed keys. `load_settings` adds ours."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_home(self) -> Self:
        try:
            choice = parse_name_server(self.rocketmq.name_server)
        except ValueError as exc:
            raise ContradictionError(f"{exc}, got {self.rocketmq.name_server!r}", "rocketmq.name_server") from exc
        broker = self.mqtemplate.broker
        if "store_path" in broker.model_fields_set:
            self._check_store_path(choice, broker.store_path)
        own_limit = self.rocketmq.producer.max_message_size
        if isinstance(choice, EmbeddedHome) and own_limit is not None and own_limit > broker.max_message_size:
            raise ContradictionError(
                f"is {own_limit}, but the broker takes {broker.max_message_size} bytes "
                "at most; raise mqtemplate.broker.max-message-size with it",
                "rocketmq.producer.max_message_size",
            )
        return self

    def _check_store_path(self, choice: EmbeddedHome | RemoteCluster, store_path: Path) -> None:
        name_server = self.rocketmq.name_server
        if isinstance(choice, RemoteCluster):
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
    def broker_choice(self) -> EmbeddedHome | RemoteCluster:
        """What ``rocketmq.name-server`` chose."""
        return parse_name_server(self.rocketmq.name_server)

    @property
    def names_no_cluster(self) -> bool:
        """Whether the broker is one of this process."""
        return isinstance(self.broker_choice, EmbeddedHome)

    @property
    def store_path(self) -> Path | None:
        """The folder of the embedded broker; None where it has none."""
        choice = self.broker_choice
        if isinstance(choice, RemoteCluster) or choice.in_memory:
            return None
        return choice.path or self.mqtemplate.broker.store_path.expanduser()

    @property
    def origins(self) -> ConfigOrigins:
        """Which files and profiles were read, and where each key was written."""
        return self._config.origins

    def get(self, key: str, default: object = None) -> object:
        """The value of any key, ours or the user's, placeholders filled in; *default* if nobody gave one."""
        value, origin = self._lookup(key)
        return default if value is UNSET else Placeholders(self._lookup).resolve(value, origin)

    def resolve(self, text: object, origin: str = "a placeholder in code") -> object:
        """Fill the ``${key:default}`` in a text; anything else is returned as it is.

        Raises:
            ConfigurationError: A key has neither value nor default.
        """
        return Placeholders(self._lookup).resolve(text, origin)

    def resolve_text(self, text: str) -> str:
        """As `resolve`, always a text: a list becomes its items joined by commas."""
        value = self.resolve(text)
        if isinstance(value, list):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def bind(self, section: str, model: type[Model]) -> Model:
        """Read a section of your own into a pydantic model: relaxed keys, environment, errors with file and line.

        Raises:
            ConfigurationError: All that is wrong with it.
        """
        return self._config.bind(section, model)

    def _lookup(self, key: str) -> tuple[object, str]:
        """As the files say, else the model's default, so that ``${rocketmq.producer.send-message-timeout}`` works."""
        value, origin = self._config.lookup(key)
        return (value, origin) if value is not UNSET else (_default_of(self, key.split(".")), "default")


def _default_of(settings: AppSettings, path: list[str]) -> object:
    value: Any = settings
    for part in path:
        name = field_named(type(value), part) if isinstance(value, BaseModel) else None
        if name is None:
            return UNSET
        value = getattr(value, name)
    return UNSET if value is None or isinstance(value, BaseModel) else value
