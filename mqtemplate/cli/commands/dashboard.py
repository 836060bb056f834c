"""``dashboard``: pages in a browser for brokers, applications, or both."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from mqtemplate.cli.invocation import TOKEN_FILE_HELP, TOP, CommandCall, cluster_of, command, refuse_token, token_of
from mqtemplate.cli.output import print_line
from mqtemplate.clock import SystemClock
from mqtemplate.context.config.masking import masked_text
from mqtemplate.errors import ConfigurationError

if TYPE_CHECKING:
    from mqtemplate.console.access import Access
    from mqtemplate.console.client import ActuatorClient
    from mqtemplate.console.dashboard import DashboardServer
    from mqtemplate.console.fleet import Place
    from mqtemplate.console.site import ServedPages
    from mqtemplate.console.sources import BrokerSource
    from mqtemplate.context.settings.features import PlaceSettings
    from mqtemplate.operations.audit import AuditLog
    from mqtemplate.server.acl.access import AccessControl

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ShownPlaces:
    """Options that name the brokers and the applications of a dashboard.

    Attributes:
        application_token: The option of earlier versions: it is refused with what to do instead.
    """

    store: Annotated[
        str | None, typer.Option("--store", metavar="FOLDER", help="store directory; the same as -n embedded:FOLDER")
    ] = None
    name_server: Annotated[
        list[str],
        typer.Option(
            "--name-server",
            "-n",
            metavar="[NAME=]NAME-SERVER",
            help="a broker, as 'host:port;host:port' or 'embedded:FOLDER' (default: rocketmq.name-server of "
            "application.yml, or the brokers of mqtemplate.dashboard.places); may be repeated",
        ),
    ] = field(default_factory=list)
    application: Annotated[
        list[str],
        typer.Option(
            "--app",
            "--url",
            metavar="[NAME=]URL",
            help="actuator of a running application: listeners, lateness; may be repeated. With several, an "
            "application and a broker of one name are shown together",
        ),
    ] = field(default_factory=list)
    application_token_file: Annotated[
        list[str],
        typer.Option("--app-token-file", metavar="[NAME=]FILE", help=f"for the application: {TOKEN_FILE_HELP}"),
    ] = field(default_factory=list)
    application_token: Annotated[str | None, typer.Option("--app-token", hidden=True, callback=refuse_token)] = None

    @contextmanager
    def pages(self, call: CommandCall, access: Access, audit: AuditLog) -> Iterator[ServedPages]:
        """Yield the pages: of one broker, one application or both, or of several under their names."""
        from mqtemplate.console.dashboard import Dashboard, several_dashboards

        name_servers, applications = _named("--name-server", self.name_server), _named("--app", self.application)
        if self.store is not None:
            if name_servers:
                raise typer.BadParameter("give --store or --name-server, not both", param_hint="--store")
            call = dataclasses.replace(call, folder=self.store)
        elif not (name_servers or applications) and (places := call.settings().mqtemplate.dashboard.places):
            found = {name: _configured_place(call, place) for name, place in places.items()}
            yield several_dashboards(found, access=access, audit=audit)
            return
        if len(name_servers) > 1 or len(applications) > 1:
            yield several_dashboards(self._places(call, name_servers, applications), access=access, audit=audit)
            return
        [url] = applications.values() or [None]
        [name_server] = name_servers.values() or [None]
        call = dataclasses.replace(call, name_server=name_server)
        with _source(call, needed=url is None) as source:
            documents = None if url is None else self._actuator(call, next(iter(applications)), url, applications)
            yield Dashboard(source, documents, access=access, audit=audit, title=_title(source, url))

    def _places(
        self, call: CommandCall, name_servers: Mapping[str, str], applications: Mapping[str, str]
    ) -> dict[str, Place]:
        from mqtemplate.console.fleet import Place

        found: dict[str, Place] = {}
        if call.folder is not None:
            found["store"] = Place(source=_late_source(call))
        for name, name_server in name_servers.items():
            found[name] = Place(source=_late_source(dataclasses.replace(call, name_server=name_server)))
        for name, url in applications.items():
            source = found[name].source if name in found else None
            found[name] = Place(source, self._actuator(call, name, url, applications))
        return found

    def _actuator(self, call: CommandCall, name: str, url: str, applications: Mapping[str, str]) -> ActuatorClient:
        from mqtemplate.console.client import ActuatorClient

        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"must be http://host:port, got {masked_text(url)!r}", param_hint="--app")
        files = _named("--app-token-file", self.application_token_file)
        others = [file for other, file in files.items() if other not in applications]
        file = files.get(name) or (others[0] if others else None)
        return ActuatorClient(url, token_of(call, None if file is None else Path(file)))


_PLACE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(.+)", re.DOTALL)
_NOT_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def _named(option: str, values: Sequence[str]) -> dict[str, str]:
    """Return the values of an option by their names; without one, it comes from the value.

    Raises:
        typer.BadParameter: Two have one name.
    """
    found: dict[str, str] = {}
    for each in filter(str.strip, values):  # a variable of the shell may not be set
        given = _PLACE.fullmatch(each)
        value = each if given is None else given[2]
        name = given[1] if given else _NOT_NAME.sub("-", urlsplit(value).netloc or value).strip("-.")[:64] or "broker"
        if name in found:
            raise typer.BadParameter(
                f"{name} is given twice; give each a name of its own, as {option} {name}-2={masked_text(value)}",
                param_hint=option,
            )
        found[name] = value
    return found


def _configured_place(call: CommandCall, place: PlaceSettings) -> Place:
    """Return a place of ``mqtemplate.dashboard.places``."""
    from mqtemplate.console.client import ActuatorClient
    from mqtemplate.console.fleet import Place

    source = documents = None
    if place.name_server is not None:
        account: dict[str, object] = {}
        if place.access_key is not None and place.secret_key is not None:
            secret_key = place.secret_key.get_secret_value()
            account = {"rocketmq__producer__access_key": place.access_key, "rocketmq__producer__secret_key": secret_key}
        source = _late_source(dataclasses.replace(call, name_server=place.name_server), **account)
    if place.application is not None:
        token = token_of(call, None) if place.token is None else place.token.get_secret_value()
        documents = ActuatorClient(place.application, token)
    return Place(source, documents)


def _late_source(call: CommandCall, **account: object) -> BrokerSource:
    """Return one of several brokers: a cluster that does not answer must not stop the others.

    Args:
        account: Keys of the account there, see `CommandCall.settings`.
    """
    from mqtemplate.console.sources import ClusterSource, FolderSource

    settings = call.settings(**account)
    cluster = cluster_of(settings)
    if cluster is not None:
        return ClusterSource(cluster, str(call.name_server or settings.rocketmq.name_server))
    if settings.store_path is None:
        raise ConfigurationError(_NO_MEMORY)
    return FolderSource(Path(settings.store_path), settings.mqtemplate.broker)


_NO_MEMORY = (
    "the broker in memory ends with its process, so the dashboard cannot see it; give --store FOLDER, "
    "--name-server host:port, or --app URL"
)


@command(
    TOP,
    "dashboard",
    "dashboard --store ./data",
    "dashboard --name-server 10.0.0.1:9876 --allow-changes",
    "dashboard --app http://127.0.0.1:9090 --store ./data",
    "dashboard --name-server eu=10.0.0.1:9876 --name-server us=10.1.0.1:9876 --app eu=http://10.0.0.5:9090",
    without=("name_server",),
)
def dashboard(
    call: CommandCall,
    places: ShownPlaces = ShownPlaces(),
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="numeric address to listen on")] = _LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 for a free one")] = 8090,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="allow changes too, after the sign-in")
    ] = False,
    allowed_host: Annotated[
        list[str], typer.Option(metavar="NAME", help="further name of this machine in addresses; may be repeated")
    ] = [],  # noqa: B006 - typer copies it
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"for /metrics, which Prometheus reads: {TOKEN_FILE_HELP}"),
    ] = None,
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
    from mqtemplate.console.access import Access
    from mqtemplate.console.dashboard import DashboardServer, dashboard_audit
    from mqtemplate.operations.audit import default_audit_path

    audit_path = audit_log or (default_audit_path() if allow_changes else None)
    with ExitStack() as closing:
        accounts = closing.enter_context(_accounts(call))
        access = Access(
            allow_changes=allow_changes,
            allowed_hosts=(*allowed_host, *(() if is_loopback else (host,))),
            accounts=accounts,
            metrics_token=token_of(call, metrics_token_file),
        )
        audit = dashboard_audit(audit_path, SystemClock())
        pages = closing.enter_context(places.pages(call, access, audit))
        _serve(DashboardServer(pages, host, port), access, is_loopback=is_loopback, audit=audit_path)


@contextmanager
def _accounts(call: CommandCall) -> Iterator[AccessControl | None]:
    """Yield the accounts of the configuration, which follow its changes; None if access control is off."""
    from mqtemplate.context.settings.broker import acl_settings
    from mqtemplate.running.reload import ConfigReload, accounts_part
    from mqtemplate.server.acl.access import AccessControl

    settings = call.settings()
    if not settings.mqtemplate.server.acl.enabled:
        yield None
        return
    accounts = AccessControl(acl_settings(settings.mqtemplate.server.acl))
    reload = ConfigReload(
        settings, call.settings, [accounts_part(lambda: accounts)], sections=("mqtemplate.server.acl.",)
    )
    with reload.running():
        yield accounts


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
        raise ConfigurationError(_NO_MEMORY)
    yield FolderSource(Path(settings.store_path), settings.mqtemplate.broker)


def _title(source: BrokerSource | None, application: str | None) -> str:
    return masked_text(" · ".join(part for part in (None if source is None else source.label, application) if part))


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
