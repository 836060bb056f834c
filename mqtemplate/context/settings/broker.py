"""The section ``mqtemplate.broker.*``: the settings of the embedded broker, and its store directory."""

from __future__ import annotations

from collections.abc import Mapping
from mqtemplate.context.config.binding import ContradictionError
from mqtemplate.context.settings.properties import SECTION_CONFIG
from mqtemplate.context.settings.properties import bytes_of
from mqtemplate.context.settings.properties import duration_in
from mqtemplate.context.settings.properties import host_and_port
from mqtemplate.context.settings.properties import upper_case
from mqtemplate.delay.levels import DelayLevels
from mqtemplate.delay.settings import TopicShape
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import ConfigurationError
from mqtemplate.errors import DestinationError
from mqtemplate.store.settings import parse_delete_when
from mqtemplate.topics import check_send_topic
from pathlib import Path
from pydantic import field_validator
from pydantic.dataclasses import dataclass
from typing import Any


DEFAULT_STORE_PATH = Path("./mqtemplate-store")


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class BrokerSettings(EmbeddedSettings):
    """The embedded broker. Sizes are bytes, or text such as ``64MiB``; durations are numbers, or text such as
    ``1h 30m``; names are those of RocketMQ's broker."""

    store_path: Path = DEFAULT_STORE_PATH
    """Store directory, relative to the working directory; created if missing. One process at a time owns it."""

    _sizes = field_validator(
        "mapped_file_size_commit_log",
        "mapped_file_size_consume_queue",
        "mapped_file_size_timer_log",
        "max_message_size",
        mode="before",
    )(bytes_of)
    _milliseconds = field_validator(
        "flush_interval_commit_log_ms",
        "checkpoint_interval_ms",
        "flush_consumer_offset_interval_ms",
        "timer_precision_ms",
        "transaction_timeout_ms",
        "transaction_check_interval_ms",
        mode="before",
    )(duration_in(1))
    _seconds = field_validator("timer_max_delay_sec", mode="before")(duration_in(1_000))
    _hours = field_validator("file_reserved_time", mode="before")(duration_in(3_600_000))
    _address = field_validator("listen_host", mode="before")(host_and_port)
    _flush_disk_type = field_validator("flush_disk_type", mode="before")(upper_case)

    @field_validator("topics", mode="before")
    @classmethod
    def _check_topics(cls, value: Any) -> Any:
        names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
        for name in names if isinstance(names, list | tuple) else ():
            try:
                check_send_topic(str(name))
            except DestinationError as exc:
                raise ValueError(str(exc)) from exc
        return names

    @field_validator("topic_shapes")
    @classmethod
    def _check_shapes(cls, value: Mapping[str, TopicShape]) -> Mapping[str, TopicShape]:
        for name in value:
            try:
                check_send_topic(name)
            except DestinationError as exc:
                raise ValueError(str(exc)) from exc
        return value

    @field_validator("delete_when", mode="before")
    @classmethod
    def _check_delete_when(cls, value: Any) -> Any:
        text = ";".join(map(str, value)) if isinstance(value, list) else str(value)
        try:
            parse_delete_when(text)
        except ConfigurationError as exc:
            raise ValueError(str(exc).removeprefix("delete-when: ")) from exc
        return text

    @field_validator("message_delay_level", mode="before")
    @classmethod
    def _check_levels(cls, value: Any) -> Any:
        text = " ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(text, str):
            try:
                DelayLevels.parse(text)
            except ConfigurationError as exc:
                raise ValueError(str(exc).removeprefix("message-delay-level: ")) from exc
        return text

    def __post_init__(self) -> None:
        if self.topic_shapes and not self.timer_wheel_enable:
            raise ContradictionError(
                "needs timers, but 'timer-wheel-enable' is false; set it to true, or remove the shapes", "topic_shapes"
            )
        try:
            super().__post_init__()
        except ConfigurationError as exc:  # the disk ratios: pydantic has checked the other rules
            ratios = ("disk_max_used_space_ratio", "disk_space_clean_forcibly_ratio", "disk_space_warning_level_ratio")
            raise ContradictionError(str(exc), *ratios) from exc
