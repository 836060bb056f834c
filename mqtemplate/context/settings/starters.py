"""Sections of the starters and of the application: ``mqtemplate.logging.*``, ``mqtemplate.spark.*`` and others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from mqtemplate.context.settings.properties import CommaList, OptionalText, Properties, UpperCase
from mqtemplate.scheduling.topic import DEFAULT_TOPIC
from mqtemplate.topics import check_topic


class LoggingSettings(Properties):
    """The logging starter: the library's events on standard error, for ``run()`` and the command line. It does
    nothing in a program that has configured `logging`; see [logging](logging.md)."""

    enabled: bool = True
    """True: the starter may show events."""
    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], UpperCase] = "INFO"
    """Least severe level of events to show."""
    format: Annotated[Literal["CONSOLE", "JSON"], UpperCase] = "CONSOLE"
    """``console`` for people, ``json`` for machines; one line per event."""


class EmbeddedStarterSettings(Properties):
    """The starter that creates the embedded broker."""

    enabled: bool = True
    """True: the starter may create one."""


class SparkSettings(Properties):
    """The Spark starter, which runs the functions marked ``@spark_listener``."""

    enabled: bool = True
    """True: the starter may start a session. It does so only if there is a Spark listener."""
    master: str = Field("local[2]", min_length=1)
    """Spark master; by default this machine with two threads."""
    checkpoint_path: Path = Path("./mqtemplate-checkpoints")
    """Directory with the progress of the queries; after a restart they continue from there."""
    conf: dict[str, str] = Field(default_factory=dict)
    """Any of Spark's own keys, such as ``spark.sql.shuffle.partitions``."""
    java_home: OptionalText = None
    """Java installation to use; searched for if not given."""

    @field_validator("conf", mode="before")
    @classmethod
    def _as_spark_writes_it(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()}


class SchedulesSettings(Properties):
    """Functions and methods marked ``@scheduled``; see [schedules](schedules.md)."""

    enabled: bool = True
    """False: this process runs no schedules; other processes may."""
    topic: Annotated[str, AfterValidator(check_topic)] = DEFAULT_TOPIC
    """Topic of the runs. Applications that share a broker need one each, or different names of schedules."""


class AutoconfigureSettings(Properties):
    """Starters of the application."""

    exclude: CommaList = ()
    """Names of starters that do not act."""


class ProfilesSettings(Properties):
    """Profiles of the configuration."""

    active: CommaList = ()
    """Names of the active profiles; a later one wins over an earlier one."""
