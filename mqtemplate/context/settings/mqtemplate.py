"""``mqtemplate.*``: the embedded broker, the starters, and the application itself."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from mqtemplate.context.settings.cluster import ClusterSettings
from mqtemplate.context.settings.properties import (
    CommaList,
    ContradictionError,
    HostPort,
    OptionalText,
    Properties,
    UpperCase,
)
from mqtemplate.context.settings.server import ServerSettings
from mqtemplate.delay.levels.table import DEFAULT_DELAY_LEVELS, DelayLevels
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.store.settings import FlushDiskType, check_disk_ratios, parse_delete_when

_MIB = 1 << 20


class BrokerSettings(Properties):
    """The embedded broker. Sizes are bytes, or text such as ``64MiB``; names are those of RocketMQ's broker."""

    store_path: Path = Path("./mqtemplate-store")
    """The folder for its files, from the working directory; made if missing. One process owns it."""
    broker_name: str = Field("broker-a", min_length=1)
    """The name that stands in queues and results."""
    listen_host: HostPort = HostAddress("127.0.0.1", 10911)
    """The address that records and message ids carry; nothing listens there. A server has its own instead."""
    flush_disk_type: Annotated[FlushDiskType, UpperCase] = FlushDiskType.SYNC_FLUSH
    """SYNC_FLUSH: a message is on the disk before it is acknowledged. ASYNC_FLUSH: it may be lost with the power."""
    mapped_file_size_commit_log: ByteSize = Field(ByteSize(64 * _MIB), gt=0)
    """Size of one commit log file. A folder keeps the size it was made with."""
    mapped_file_size_consume_queue: ByteSize = Field(ByteSize(600_000), gt=0, multiple_of=20)
    """Size of one consume queue file, a multiple of its 20-byte units."""
    mapped_file_size_timer_log: ByteSize = Field(ByteSize(4 * _MIB), gt=0)
    """Size of one timer log file."""
    max_hash_slot_num: int = Field(250_000, gt=0, lt=1 << 31)
    """Slots of one index file: 4 bytes each. A folder keeps the number it was made with."""
    max_index_num: int = Field(1_000_000, gt=1, lt=1 << 31)
    """Keys that one index file has room for: 20 bytes each. A folder keeps the number it was made with."""
    max_message_size: ByteSize = Field(ByteSize(4 * _MIB), gt=0)
    """What the broker takes at most, in bytes."""
    default_topic_queue_nums: int = Field(4, ge=1, le=1_024)
    """How many queues a topic gets when it is made by its first message."""
    flush_interval_commit_log_ms: int = Field(500, gt=0)
    """With ASYNC_FLUSH: milliseconds between two flushes."""
    flush_consumer_offset_interval_ms: int = Field(5_000, gt=0)
    """Milliseconds between two writes of how far the groups are."""
    checkpoint_interval_ms: int = Field(1_000, gt=0)
    """Milliseconds between two checkpoints, from which a restart reads the log again."""
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    """The delay levels, level 1 first, with the units s, m, h and d."""
    timer_wheel_enable: bool = True
    """Whether delays of any length are kept; if not, sends that ask for one are refused."""
    timer_precision_ms: int = Field(1_000, gt=0, le=1_000)
    """Length of a wheel slot. Delivery is exact to the millisecond all the same."""
    timer_max_delay_sec: int = Field(40 * 86_400, gt=0)
    """The longest delay that is taken."""
    timer_roll_window_slot: int = Field(172_800, gt=1)
    """Slots after which a message that waits longer is written again."""
    transaction_timeout_ms: int = Field(6_000, gt=0)
    """Milliseconds after which the producer group is asked what became of a transaction that has not ended."""
    transaction_check_interval_ms: int = Field(30_000, gt=0)
    """Milliseconds from one question to the next."""
    transaction_check_max: int = Field(15, ge=1)
    """Questions without an answer before the message goes to ``TRANS_CHECK_MAX_TIME_TOPIC``."""
    file_reserved_time: int = Field(72, ge=1)
    """Hours that messages are kept after the newest one of their file. What waits is kept until it is delivered."""
    delete_when: str = "04"
    """Hours of the day, local time, in which older files are deleted; several as ``04;16``."""
    disk_max_used_space_ratio: int = 75
    """Percent of the disk above which they are deleted at any hour; it counts, as do the next two, where there is no
    room for 16 more commit log files."""
    disk_space_clean_forcibly_ratio: int = 85
    """Percent above which the oldest files are deleted whatever their age."""
    disk_space_warning_level_ratio: int = 90
    """Percent above which no new message is taken. None of the three may be above the next; 100 switches one off."""
    clean_file_forcibly_enable: bool = True
    """Whether files may be deleted that are not old, when the disk is that full."""

    @field_validator("delete_when", mode="before")
    @classmethod
    def _check_delete_when(cls, value: Any) -> Any:
        text = ";".join(map(str, value)) if isinstance(value, list) else str(value)
        try:
            parse_delete_when(text)
        except ConfigurationError as exc:
            raise ValueError(str(exc).removeprefix("delete-when: ")) from exc
        return text

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        try:
            check_disk_ratios(
                self.disk_max_used_space_ratio,
                self.disk_space_clean_forcibly_ratio,
                self.disk_space_warning_level_ratio,
            )
        except ConfigurationError as exc:
            names = ("disk_max_used_space_ratio", "disk_space_clean_forcibly_ratio", "disk_space_warning_level_ratio")
            given = [name for name in names if name in self.model_fields_set]
            raise ContradictionError(str(exc), *given) from exc
        return self

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


class LogFormat(Enum):
    """How a log line looks."""

    CONSOLE = "CONSOLE"
    JSON = "JSON"


class LogLevel(Enum):
    """The least severe events that are written."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


class LoggingSettings(Properties):
    """The logging starter. It does nothing in a program that has configured structlog itself."""

    enabled: bool = True
    """Whether the starter may configure the logs."""
    level: Annotated[LogLevel, UpperCase] = LogLevel.INFO
    """The least severe events to write, of this program and of its libraries."""
    format: Annotated[LogFormat, UpperCase] = LogFormat.CONSOLE
    """``console`` for people, ``json`` for machines, a line an event."""


class EmbeddedStarterSettings(Properties):
    """The starter that makes the embedded broker."""

    enabled: bool = True
    """Whether the starter may make one."""


class SparkSettings(Properties):
    """The Spark starter, which runs the functions marked ``@spark_listener``."""

    enabled: bool = True
    """Whether the starter may start a session. It does so only if there is a Spark listener."""
    master: str = Field("local[2]", min_length=1)
    """Where Spark runs; on this machine with two threads by default."""
    checkpoint_path: Path = Path("./mqtemplate-checkpoints")
    """The folder with the progress of the queries; it decides where a restart goes on."""
    conf: dict[str, str] = Field(default_factory=dict)
    """Any of Spark's own keys, such as ``spark.sql.shuffle.partitions``."""
    java_home: OptionalText = None
    """The Java to use; found by itself if not given."""

    @field_validator("conf", mode="before")
    @classmethod
    def _as_spark_writes_it(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()}


class AutoconfigureSettings(Properties):
    """Which starters may act."""

    exclude: CommaList = ()
    """Names of starters to leave alone."""


class ProfilesSettings(Properties):
    """Which variants of the configuration are in force."""

    active: CommaList = ()
    """Names of profiles; a later one wins over an earlier one."""


class MQTemplateSettings(Properties):
    """What Spring's files do not have: the embedded broker, the starters, and the application itself."""

    broker: BrokerSettings = BrokerSettings()
    server: ServerSettings = ServerSettings()
    cluster: ClusterSettings = ClusterSettings()
    embedded: EmbeddedStarterSettings = EmbeddedStarterSettings()
    logging: LoggingSettings = LoggingSettings()
    spark: SparkSettings = SparkSettings()
    autoconfigure: AutoconfigureSettings = AutoconfigureSettings()
    profiles: ProfilesSettings = ProfilesSettings()
