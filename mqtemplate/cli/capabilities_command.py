"""``python -m mqtemplate capabilities``: the capabilities of brokers, and their differences."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from mqtemplate.broker import Capability
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.cli.output import print_line
from mqtemplate.context.config.source import load_settings
from mqtemplate.context.settings.name_server import RemoteCluster
from mqtemplate.context.settings.remote_settings import remote_settings

HELP = "print the capabilities of brokers, and their differences"
DESCRIPTION = """\
Print the capabilities of the broker of each name server, and their differences. All brokers guarantee what
the Broker interface specifies; a capability is what only some brokers have. A name server is a value of
rocketmq.name-server: 'embedded:./data', or 'host:port;host:port'. Access keys and TLS are read from
application.yml.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments to its parser."""
    help_text = "name server of a broker (default: rocketmq.name-server)"
    parser.add_argument("name_servers", metavar="NAME-SERVER", nargs="*", help=help_text)


def run(options: argparse.Namespace) -> None:
    """Print the capabilities of the brokers that the options name.

    Raises:
        MQTemplateError: The settings are invalid, or a broker does not answer.
    """
    found = dict(_capabilities(name_server, options) for name_server in options.name_servers or [None])
    print_line(capability_report(found))


def _capabilities(name_server: str | None, options: argparse.Namespace) -> tuple[str, frozenset[Capability]]:
    arguments = {} if name_server is None else {"rocketmq.name-server": name_server}
    settings = load_settings(options.config, options.profile, arguments=arguments)
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
