"""The settings of a further template, as if they were those of the application."""

from __future__ import annotations

from typing import Any

from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.rocketmq import (
    ClientSettings,
    ProducerSettings,
    PullConsumerSettings,
    RocketMQSettings,
    TemplateSettings,
)

_IDENTITY = frozenset(ClientSettings.model_fields)
"""Keys of the connection to a cluster. They hold for the cluster of the application only: secrets for it do not go to
another one."""
_LIMITS = frozenset(ProducerSettings.model_fields) - _IDENTITY - {"group"}


def settings_of_template(application: AppSettings, given: TemplateSettings, name: str) -> AppSettings:
    """Return the settings of the application with the section ``rocketmq`` of one further template.

    Args:
        given: The keys of the template.
        name: Name of the template, for errors.
    """
    own = application.rocketmq
    is_same_cluster = given.name_server in (None, own.name_server)
    values = _set(own.producer, _LIMITS)
    if is_same_cluster:
        for section in (own.pull_consumer, own.consumer, own.producer):
            values |= _set(section, _IDENTITY - {"instance_name"})
    values |= _set(given, frozenset(ProducerSettings.model_fields))
    rocketmq = RocketMQSettings(
        name_server=given.name_server or own.name_server,
        access_channel=given.access_channel or (own.access_channel if is_same_cluster else None),
        producer=ProducerSettings(**values),
        pull_consumer=PullConsumerSettings(**_set(given.pull_consumer, frozenset(PullConsumerSettings.model_fields))),
    )
    return application.with_rocketmq(rocketmq, f"rocketmq.templates.{name}")


def _set(section: Any, names: frozenset[str]) -> dict[str, Any]:
    """Return those fields of a section that were given."""
    return {name: getattr(section, name) for name in section.model_fields_set & names}
