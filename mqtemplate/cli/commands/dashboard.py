"""``dashboard``: pages in a browser for a broker, an application, or both."""

from __future__ import annotations

import dataclasses
import ipaddress
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqtemplate.cli.invocation import TOKEN_FILE_HELP, TOP, CommandCall, cluster_of, command, refuse_token, token_of
from mqtemplate.cli.output import print_line
from mqtemplate.clock import SystemClock
from mqtemplate.console.client import ActuatorClient
from mqtemplate.context.config.masking import masked_text
from mqtemplate.errors import ConfigurationError

if TYPE_CHECKING:
    from mqtemplate.console.access import Access
    from mqtemplate.console.dashboard import DashboardServer
    from mqtemplate.console.sources import BrokerSource

_LOOPBACK = "127.0.0.1"


@command(
    TOP,
    "dashboard",
    "dashboard --store ./data",
    "dashboard --name-server 10.0.0.1:9876 --allow-changes",
    "dashboard --app http://127.0.0.1:9090 --store ./data",
)
def dashboard(
    call: CommandCall,
    store: Annotated[
        str | None, typer.Option("--store", metavar="FOLDER", help="store directory; the same as -n embedded:FOLDER")
    ] = None,
    application: Annotated[
        str | None, typer.Option("--app", metavar="URL", help="actuator of a running application: listeners, lateness")
    ] = None,
    application_token_file: Annotated[
        Path | None,
        typer.Option("--app-token-file", metavar="FILE", help=f"for the application: {TOKEN_FILE_HELP}"),
    ] = None,
    application_token: Annotated[str | None, typer.Option("--app-token", hidden=True, callback=refuse_token)] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="numeric address to listen on")] = _LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 for a free one")] = 8090,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="allow changes too, after the sign-in")
    ] = False,
    allowed_host: Annotated[
        list[str], typer.Option(metavar="NAME", help="further name of this machine in addresses; may be repeated")
    ] = [],  # noqa: B006 - typer copies it
    audit_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="log of changes (default: ~/.local/state/mqtemplate/audit.jsonl)"),
    ] = None,
) -> None:
    """Serve pages that show a broker, an application, or both, in a browser."""
    from mqtemplate.console.server import check_installed

    check_installed()
    is_loopback = _is_loopback(host)
    if ipaddress.ip_address(host).is_unspecified and not allowed_host:
        raise typer.BadParameter(
            f"with {host} the dashboard cannot know its names: give those that browsers use with --allowed-host, such "
            "as --allowed-host 10.0.0.5",
            param_hint="--host",
        )
    if store is not None:
        if call.name_server is not None:
            raise typer.BadParameter("give --store or --name-server, not both", param_hint="--store")
        call = dataclasses.replace(call, folder=store)
    from mqtemplate.console.access import Access
    from mqtemplate.console.dashboard import Dashboard, DashboardServer, dashboard_audit
    from mqtemplate.operations.audit import default_audit_path

    audit_path = audit_log or (default_audit_path() if allow_changes else None)
    audit = dashboard_audit(audit_path, SystemClock())
    access = Access(
        allow_changes=allow_changes,
        allowed_hosts=(*allowed_host, *(() if is_loopback else (host,))),
    )
    with _source(call, needed=application is None) as source:
        documents = None if application is None else _actuator(call, application, application_token_file)
        pages = Dashboard(source, documents, access=access, audit=audit, title=_title(source, application))
        _serve(DashboardServer(pages, host, port), access, is_loopback=is_loopback, audit=audit_path)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise typer.BadParameter(
            f"must be a numeric address, such as 127.0.0.1 or ::1, got {host!r}", param_hint="--host"
        ) from None


@contextmanager
def _source(call: CommandCall, *, needed: bool) -> Iterator[BrokerSource | None]:
    """Yield the broker that the options name; None if they name none and only an application is shown."""
    if call.name_server is None and call.folder is None and not needed:
        yield None
        return
    from mqtemplate.console.sources import FolderSource, OpenSource
    from mqtemplate.operations import BrokerAccess

    settings = call.settings()
    cluster = cluster_of(settings)
    if cluster is not None:
        with cluster:
            label = call.name_server or settings.rocketmq.name_server or "cluster"
            yield OpenSource(BrokerAccess(cluster), str(label))
        return
    if settings.store_path is None:
        raise ConfigurationError(
            "the broker in memory ends with its process, so the dashboard cannot see it; give --store FOLDER, "
            "--name-server host:port, or --app URL"
        )
    yield FolderSource(Path(settings.store_path), settings.mqtemplate.broker)


def _title(source: BrokerSource | None, application: str | None) -> str:
    return masked_text(" · ".join(part for part in (None if source is None else source.label, application) if part))


def _actuator(call: CommandCall, url: str, token_file: Path | None) -> ActuatorClient:
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"must be http://host:port, got {masked_text(url)!r}", param_hint="--app")
    return ActuatorClient(url, token_of(call, token_file))


def _serve(server: DashboardServer, access: Access, *, is_loopback: bool, audit: Path | None) -> None:
    from mqtemplate.context.signals import StopRequests
    from mqtemplate.processes import prompt_threads

    stop_requests = StopRequests()
    # A count of a million messages must not delay the pages beside it.
    with prompt_threads(), stop_requests.from_signals():
        server.start()
        try:
            print_line(f"dashboard: http://{server.address}/sign-in?token={access.token}")
            if audit is not None:
                print_line(f"changes are logged to {audit}")
            if not is_loopback:
                print_line(
                    f"warning: other machines can connect to {server.address} without encryption, so the token and "
                    "messages can be read on the way; put a proxy with TLS before it, or use a tunnel",
                    sys.stderr,
                )
            print_line("press Ctrl-C to stop")
            stop_requests.wait()
        finally:
            server.stop()
