"""``python -m mqtemplate capabilities``: the capabilities of brokers, and their differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mqtemplate.broker import Capability
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.cli.invocation import Invocation
from mqtemplate.context.settings.name_server import RemoteCluster
from mqtemplate.context.settings.remote_settings import remote_settings


def capabilities_of(call: Invocation, name_servers: Sequence[str]) -> dict[str, frozenset[Capability]]:
    """Return the capabilities of the broker of each name server; of the configured one if none is given.

    Raises:
        MQTemplateError: The settings are invalid, or a broker does not answer.
    """
    return dict(_capabilities(name_server, call) for name_server in name_servers or [None])


def _capabilities(name_server: str | None, call: Invocation) -> tuple[str, frozenset[Capability]]:
    settings = dataclasses.replace(call, name_server=name_server).settings()
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
