"""``python -m mqtemplate capabilities``: what brokers can do, and in what they differ."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mqtemplate.broker import Capability
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker
from mqtemplate.cli.say import say
from mqtemplate.context import load_settings, remote_settings
from mqtemplate.context.settings.name_server import RemoteCluster

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Print what the broker of each name server can do, and in what they differ. The port's promises hold for
all of them; these are what some have beside. A name server is what rocketmq.name-server takes:
'embedded:./data', or 'host:port;host:port'. Access keys and TLS are taken from application.yml.
"""


def add_capabilities_command(commands: Subparsers) -> None:
    """Describe the command to the parser."""
    parser = commands.add_parser(
        "capabilities",
        help="what brokers can do, and in what they differ",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "name_servers", metavar="NAME-SERVER", nargs="*", help="whose broker (default: rocketmq.name-server)"
    )
    parser.add_argument("--config", metavar="FOLDER", help="where application.yml is (default: this folder)")
    parser.add_argument("--profile", metavar="NAME", action="append", default=[], help="a profile; may be repeated")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    found: dict[str, frozenset[Capability]] = {}
    for given in options.name_servers or [None]:
        name, capabilities = _ask(given, options)
        found[name] = capabilities
    say(capability_report(found))


def _ask(name_server: str | None, options: argparse.Namespace) -> tuple[str, frozenset[Capability]]:
    arguments = {} if name_server is None else {"rocketmq.name-server": name_server}
    settings = load_settings(options.config, options.profile, arguments=arguments)
    name = settings.rocketmq.name_server
    if not isinstance(settings.broker_choice, RemoteCluster):
        return name, EmbeddedBroker(settings.store_path).capabilities  # it need not be opened for that
    with RemoteBroker(remote_settings(settings)) as broker:
        return name, broker.capabilities


def capability_report(found: Mapping[str, frozenset[Capability]]) -> str:
    """A table: a line a capability, a column a broker; a star before what not all of them have."""
    width = max(len(capability.value) for capability in Capability) + 2
    lines = [" " * (width + 2) + "  ".join(found)]
    for capability in Capability:
        answers = [capability in capabilities for capabilities in found.values()]
        cells = ["yes" if answer else "no" for answer in answers]
        columns = "  ".join(cell.ljust(len(name)) for cell, name in zip(cells, found, strict=True))
        mark = "* " if len(set(answers)) > 1 else "  "
        lines.append((mark + capability.value.ljust(width) + columns).rstrip())
    if len(found) > 1:
        lines.append("* marks in what they differ")
    return "\n".join(lines)
