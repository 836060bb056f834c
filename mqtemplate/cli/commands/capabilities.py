"""``python -m mqtemplate capabilities``: the capabilities of brokers, and their differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mqtemplate.broker import Capability
from mqtemplate.cli.invocation import Invocation, command

if TYPE_CHECKING:
    from mqtemplate.context.settings.app import AppSettings


def add_commands(app: typer.Typer) -> None:
    """Add the command to the program."""
    examples = ("capabilities", "capabilities embedded:./data 127.0.0.1:9876 --json")
    command(app, "capabilities", *examples, without=("name_server",))(capabilities)


def capabilities(
    call: Invocation,
    name_servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME-SERVER]...", help="name server of a broker (default: rocketmq.name-server)"),
    ] = None,
) -> None:
    """Show the capabilities of brokers, and their differences.

    All brokers guarantee what the Broker interface specifies; a capability is what only some brokers have. A name
    server is a value of rocketmq.name-server: 'embedded:./data', or 'host:port;host:port'. Access keys and TLS are
    read from application.yml.
    """
    calls = [replace(call, name_server=name_server) for name_server in name_servers or (None,)]
    found = dict(capabilities_of(each.settings()) for each in calls)
    call.output.document({name: sorted(each.value for each in given) for name, given in found.items()})
    for line in capability_report(found).splitlines():
        call.output.line(line)


def capabilities_of(settings: AppSettings) -> tuple[str, frozenset[Capability]]:
    """Return name server and capabilities of the broker that the settings choose.

    Raises:
        MQTemplateError: The settings are invalid, or the broker does not answer.
    """
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.context.settings.clients import remote_settings
    from mqtemplate.context.settings.rocketmq import ClusterAddresses

    name = settings.rocketmq.name_server
    if not isinstance(settings.broker_choice, ClusterAddresses):
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
