"""``python -m mqtemplate capabilities``: the capabilities of brokers, and their differences."""

from __future__ import annotations

from collections.abc import Mapping

from mqtemplate.broker import Capability
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.name_server import RemoteCluster
from mqtemplate.context.settings.remote_settings import remote_settings


def capabilities_of(settings: AppSettings) -> tuple[str, frozenset[Capability]]:
    """Return name server and capabilities of the broker that the settings choose.

    Raises:
        MQTemplateError: The settings are invalid, or the broker does not answer.
    """
    name = settings.rocketmq.name_server
    if not isinstance(settings.broker_choice, RemoteCluster):
        return name, EmbeddedBroker(settings.store_path).capabilities  # without opening the store
    with RemoteBroker(remote_settings(settings)) as broker:
        return name, broker.capabilities


def capability_report(found: Mapping[str, frozenset[Capability]]) -> str:
    """Return a table: one line per capability, one column per broker. A star marks the differences."""
    width = max(len(capability.value) for capability in Capability) + 2
    lines = [" " * (width + 2) + "  ".join(found)]
    for capability in Capability:
        answers = [capability in capabilities for capabilities in found.values()]
        cells = ["yes" if answer else "no" for answer in answers]
        columns = "  ".join(cell.ljust(len(name)) for cell, name in zip(cells, found, strict=True))
        mark = "* " if len(set(answers)) > 1 else "  "
        lines.append((mark + capability.value.ljust(width) + columns).rstrip())
    if len(found) > 1:
        lines.append("* marks a difference")
    return "\n".join(lines)
