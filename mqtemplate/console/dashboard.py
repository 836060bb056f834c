"""The dashboard: it checks access to each request, finds its page, and turns errors into pages."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.console import application, dead_letters, delayed, messages, overview, topics
from mqtemplate.console.access import Access
from mqtemplate.console.actuator import Actuator, prometheus_response
from mqtemplate.console.cache import BackgroundCache, Rates
from mqtemplate.console.client import AccountActuator, LocalActuator
from mqtemplate.console.fleet import Fleet, Place
from mqtemplate.console.jobs import Jobs, JobState
from mqtemplate.console.rendering import STATIC_TYPES, compile_templates, static_files
from mqtemplate.console.server import MAX_FORM_BYTES, ConsoleServer
from mqtemplate.console.site import OF_ADMINS, ApplicationDocuments, Call, Page, ServedPages, Site, merged
from mqtemplate.console.sources import AccountSource, BrokerSource, OpenSource
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker import acl_settings
from mqtemplate.context.settings.features import ManagementSettings
from mqtemplate.errors import (
    BrokerError,
    MessageError,
    MQTemplateError,
    StoreLockedError,
    UnknownNameError,
    UnsupportedError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.extras import install_command
from mqtemplate.http.bridges import AsgiApp, WsgiApp, asgi_application, wsgi_application
from mqtemplate.http.exchange import HttpRequest, HttpResponse
from mqtemplate.http.tokens import TokenAnswer
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.account import AccountRights, NoRightError
from mqtemplate.operations.audit import AuditLog, default_audit_path
from mqtemplate.operations.bulk import parse_time
from mqtemplate.operations.changes import LISTENER_SEEK, Change, UnconfirmedChangeError
from mqtemplate.operations.undo import undo_change, why_not_undone
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, AccountRole

_log = get_logger("mqtemplate.dashboard")

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _CSP),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    # Not no-referrer: with that a browser sends "Origin: null" with the forms of this site.
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_NO_STORE = ("Cache-Control", "no-store")
_FOREVER = ("Cache-Control", "public, max-age=31536000, immutable")
_WRONG_TOKEN = "The token is wrong."
_WRONG_KEYS = "The access key is unknown, or the secret key is wrong."
_TOO_MANY_TOKENS = "The token is wrong. There were too many wrong ones, so this one is not logged; the right one works."
_TOO_MANY = "There were too many wrong secret keys for this access key from your address: wait a minute, and try again."
_CHANGES_OF_ADMINS = frozenset(
    {
        "/topics/create/preview",
        "/topics/create",
        "/topics/delete/preview",
        "/topics/delete",
        "/groups/create/preview",
        "/groups/create",
        "/groups/delete/preview",
        "/groups/delete",
    }
)
_SHOWN = 100
_MOST_TOPICS = 20
_PREPARE_S = 2.0
"""Time that a server waits at its start: reading a broker beside the first pages would make them slow."""
_OF = ("listener", "group", "topic", "name", "filter", "schedule", "undo_of")
_STATUS: tuple[tuple[type[MQTemplateError], int], ...] = (
    (NoRightError, 403),
    (UnknownNameError, 404),
    (UnsupportedError, 501),
    (StoreLockedError, 409),
    (UnconfirmedChangeError, 409),
    (MessageError, 400),
    (BrokerError, 503),
)


# --- pages of changes ---------------------------------------------------------------------------


def _show_job(site: Site, call: Call) -> HttpResponse:
    """Return the page of a job. It reloads itself while the job runs."""
    job = site.jobs.get(call.needed("id"))
    return site.page(call, "job.html", job=job, is_running=job.state is JobState.RUNNING)


def _stop_job(site: Site, call: Call) -> HttpResponse:
    """Stop a job before its next message."""
    job = site.jobs.get(call.field("id"))
    with site.audit.change("job.stop", call.request.remote, job=job.title):
        job.must_stop = True
    return site.redirect(call.url("/jobs", id=job.id))


def _changes(site: Site, call: Call) -> HttpResponse:
    """Return the list."""
    rows: list[dict[str, Any]] = []
    for each in site.audit.recent(_SHOWN):
        reason = why_not_undone(each)
        seek = each.facts.get("application_change") if each.action == LISTENER_SEEK else None
        rows.append(
            {
                "change": each,
                "time_ms": parse_time(each.time),
                "of": ", ".join(f"{name} {each.facts[name]}" for name in _OF if each.facts.get(name)),
                "reason": None if seek else reason,
                "seek": seek,
                "can_undo": bool(seek) or (reason is None and site.source is not None),
            }
        )
    return site.page(call, "changes.html", rows=rows)


def _preview_undo(site: Site, call: Call) -> HttpResponse:
    """Show what the undoing of a change would do."""
    return _undo_page(site, call)


def _undo_page(site: Site, call: Call, problem: str = "") -> HttpResponse:
    logged = site.audit.get(call.field("id"))
    with site.reading() as access:
        change = undo_change(access, logged)
        shown = change.preview
        title = change.title
    return site.page(
        call,
        "change_preview.html",
        409 if problem else 200,
        heading=f"Undo {logged.action}",
        request=title,
        preview=shown,
        problem=problem,
        address=call.url("/changes/undo"),
        fields=[("id", logged.id)],
        button="Undo",
        back=call.url("/changes"),
    )


def _undo(site: Site, call: Call) -> HttpResponse:
    """Undo a change that was shown before."""
    logged = site.audit.get(call.field("id"))

    def build(access: BrokerAccess) -> Change:
        return undo_change(access, logged)

    return site.start_change(call, build, call.url("/changes"), lambda problem: _undo_page(site, call, problem))


_ROUTES = merged(
    [
        overview.ROUTES,
        topics.ROUTES,
        messages.ROUTES,
        delayed.ROUTES,
        dead_letters.ROUTES,
        application.ROUTES,
        {
            ("GET", "/jobs"): _show_job,
            ("POST", "/jobs/stop"): _stop_job,
            ("GET", "/changes"): _changes,
            ("POST", "/changes/preview"): _preview_undo,
            ("POST", "/changes/undo"): _undo,
        },
    ]
)


# --- the dashboard ------------------------------------------------------------------------------


class Dashboard:
    """Pages for one broker, for one application, or for both.

    Args:
        source: The broker; None without one.
        application: The documents of a running application; None without one.
        title: Name for a reader; by default the broker's.
        place: See `Site.place`.
        places: See `Site.places`.
        home: Returns the first page; by default the overview.
        clock: A virtual clock lets all work run in the calling thread.
    """

    def __init__(
        self,
        source: BrokerSource | None,
        application: ApplicationDocuments | None = None,
        *,
        access: Access,
        audit: AuditLog,
        title: str = "",
        place: str = "",
        places: Sequence[str] = (),
        home: Page = overview.overview,
        clock: Clock = SystemClock(),
    ) -> None:
        self._source = source
        self._in_background = not clock.is_virtual
        self._of_accounts: dict[str, tuple[Account, Site]] = {}
        self._site = Site(
            title=title or (source.label if source is not None else "mqtemplate"),
            source=source,
            application=application,
            access=access,
            audit=audit,
            cache=BackgroundCache(in_background=self._in_background),
            jobs=Jobs(in_background=self._in_background),
            rates=Rates(),
            place=place,
            places=places,
        )
        self._routes = {**_ROUTES, ("GET", "/"): home}
        self._cluster_delays = delayed.ClusterDelays()

    def prepare(self, wait_s: float = 0.0) -> None:
        """Compile the pages, and read what takes long: the first page comes as fast as later ones.

        Args:
            wait_s: Most time to wait for it. What takes longer is read in the background.
        """
        compile_templates()
        static_files()
        if self._source is not None:
            overview.prepare(self._site, wait_s)

    def close(self) -> None:
        """Stop the running job, and close the source."""
        self._site.jobs.close()
        if self._source is not None:
            self._source.close()

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request."""
        if not self._site.access.is_host_allowed(request):
            return _secured(_refused_host(request))
        call = Call(request)
        path = request.path or "/"
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        try:
            return _secured(self._respond(call, path))
        except MQTemplateError as exc:
            status = next((status for kind, status in _STATUS if isinstance(exc, kind)), 500)
            return _secured(self._error(call, status, str(exc)))
        except Exception as exc:
            _log.exception("dashboard.request_failed", path=path)
            return _secured(self._error(call, 500, f"{type(exc).__name__}: {exc}"))

    def _respond(self, call: Call, path: str) -> HttpResponse:
        method = "GET" if call.request.method == "HEAD" else call.request.method
        if (method, path) == ("GET", "/metrics"):
            return self._metrics(call)
        if path == "/sign-in" or (method == "GET" and call.text("token")):
            return self._sign_in(call, method, path)
        if not self._site.access.may_read(call.request):
            return self._site.page(call, "sign_in.html", 401, error="")
        rights = self._rights_of(call)
        page = self._routes.get((method, path))
        if page is None:
            known = any(route == path for _, route in _ROUTES)
            return self._error(call, 405 if known else 404, f"there is no page {path}")
        if method == "POST":
            refusal = self._site.access.refusal_of_change(call.request, call.field("form_token"))
            if refusal is not None:
                return self._error(call, 403, refusal)
            call.check_complete()
        if rights is not None:
            if method == "POST":
                rights.check_role(AccountRole.OPERATOR, "a change")
            if path in (*OF_ADMINS, *_CHANGES_OF_ADMINS):
                rights.check_role(AccountRole.ADMIN, "this page")
            named = call.field if method == "POST" else call.text
            rights.check_names(named("topic"), named("group"))
        return page(self.site_of(call), call)

    def _metrics(self, call: Call) -> HttpResponse:
        """Return the metrics of the delay services of a RocketMQ cluster, for Prometheus.

        Each ``topic`` of the address names one whose late deliveries are measured.
        """
        if (refusal := self._site.access.refusal_of_metrics(call.request)) is not None:
            return _plain(*refusal)
        topics = {value for name, value in call.request.query if name == "topic" and value}
        if len(topics) > _MOST_TOPICS:
            return _plain(400, f"at most {_MOST_TOPICS} topics have their late deliveries measured, got {len(topics)}")
        if self._source is None:
            return _plain(404, "these pages show no broker of their own; with several each has /at/NAME/metrics")
        if find_spec("prometheus_client") is None:
            return _plain(501, f"the metrics need prometheus-client: {install_command('prometheus')}")
        try:
            with self._site.reading() as access:
                console = access.broker.delay_console
                if console is None:
                    return _plain(501, "this broker is none of RocketMQ: its process has /actuator/prometheus")
                self._cluster_delays.update(access.broker, console, topics)
        except MQTemplateError as exc:
            return _plain(404 if isinstance(exc, UnknownNameError) else 503, str(exc))
        return prometheus_response(self._cluster_delays.metrics)

    def _rights_of(self, call: Call) -> AccountRights | None:
        """Return the rights of the account that has signed in; None for the token, and without a sign-in."""
        access = self._site.access
        account = access.account_of(access.session_of(call.request))
        if account is None or access.accounts is None:
            return None
        return AccountRights(access.accounts, account.access_key)

    def site_of(self, call: Call) -> Site:
        """Return the dashboard as the user of a request sees it; for an account with values of its own."""
        rights = self._rights_of(call)
        if rights is None:
            return self._site
        account, of_accounts = rights.account, self._of_accounts
        found = of_accounts.get(account.access_key)
        if found is None or found[0] != account:
            found = of_accounts[account.access_key] = account, self._new_site(rights)
            for gone in [key for key in of_accounts if not self._site.access.is_account(key)]:
                of_accounts.pop(gone, None)
        return found[1]

    def _new_site(self, rights: AccountRights) -> Site:
        site, name = self._site, rights.access_key
        if rights.account.role is AccountRole.ADMIN:
            application = None if site.application is None else site.application.of(name)
            return dataclasses.replace(site, application=application, audit=site.audit.of(name))
        return dataclasses.replace(
            site,
            source=None if site.source is None else AccountSource(site.source, rights),
            application=None if site.application is None else AccountActuator(site.application, rights),
            audit=site.audit.of(name, only_own=True),
            cache=BackgroundCache(in_background=self._in_background),
            rates=Rates(),
        )

    def _error(self, call: Call, status: int, text: str) -> HttpResponse:
        return self._site.page(call, "error.html", status, reason=HTTPStatus(status).phrase, text=text)

    def _sign_in(self, call: Call, method: str, path: str) -> HttpResponse:
        """Sign in by the link of the start (GET), or by a token or an account in a form (POST); or sign out."""
        access = self._site.access
        if method not in ("GET", "POST"):
            return self._error(call, 405, f"{method} is not allowed here")
        if method == "POST" and (foreign := access.foreign_origin(call.request)) is not None:
            return self._error(call, 403, f"the form was sent by another site, {foreign}")
        if method == "POST" and call.field("action") == "sign-out":
            if not access.is_form_token(call.field("form_token"), call.request):
                return self._error(call, 403, "the form is not from this dashboard; reload the page")
            return self._site.redirect(call.url("/sign-in"), ("Set-Cookie", access.sign_out(call.request)))
        account = call.field("access_key").strip() if method == "POST" else ""
        if account:
            return self._signed_in(call, path, access.sign_in_account(account, call.field("secret_key"), call.request))
        token = call.field("token") if method == "POST" else call.text("token")
        if not token:
            return self._site.page(call, "sign_in.html", error="")
        return self._signed_in(call, path, access.sign_in(token.strip(), call.request))

    def _signed_in(self, call: Call, path: str, answer: str | TokenAnswer) -> HttpResponse:
        """Return the response to a sign-in: a redirect with the cookie, or the form with the error."""
        account = (call.field("access_key").strip() or None) if call.request.method == "POST" else None
        if answer is TokenAnswer.TOO_MANY:
            return self._site.page(call, "sign_in.html", 429, error=_TOO_MANY_TOKENS if account is None else _TOO_MANY)
        if isinstance(answer, TokenAnswer):
            _log.warning("dashboard.sign_in_failed", remote=call.request.remote, account=account)
            return self._site.page(call, "sign_in.html", 403, error=_WRONG_TOKEN if account is None else _WRONG_KEYS)
        if account is not None:
            _log.info("dashboard.signed_in", remote=call.request.remote, account=account)
        # The token leaves the address, and so the history of the browser.
        target = call.url("/") if path == "/sign-in" else call.same_page(token=None)
        return self._site.redirect(target, ("Set-Cookie", answer))


def _refused_host(request: HttpRequest) -> HttpResponse:
    host = request.headers.get("host", "")
    text = (
        f"host {host!r} is not allowed; name it with --allowed-host, or mqtemplate.management.dashboard.allowed-hosts"
    )
    return HttpResponse(421, f"{text}\n".encode())


def _plain(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, f"{text}\n".encode(), headers=(_NO_STORE,))


def _static(name: str) -> HttpResponse:
    body = static_files().get(name)
    if body is None:
        return _secured(HttpResponse(404, b"no such file\n"))
    content_type = STATIC_TYPES[f".{name.rpartition('.')[2]}"]
    return HttpResponse(200, body, content_type, (*_HEADERS, _FOREVER))


def _secured(response: HttpResponse) -> HttpResponse:
    return HttpResponse(
        response.status, response.body, response.content_type, (*response.headers, *_HEADERS, _NO_STORE)
    )


def dashboard_wsgi_app(dashboard: Dashboard) -> WsgiApp:
    """Return the dashboard as a WSGI application, to mount below any path."""
    return wsgi_application(dashboard.handle, MAX_FORM_BYTES)


def dashboard_asgi_app(dashboard: Dashboard) -> AsgiApp:
    """Return the dashboard as an ASGI application, to mount below any path."""
    return asgi_application(dashboard.handle, MAX_FORM_BYTES)


def dashboard_audit(path: Path | None, clock: Clock) -> AuditLog:
    """Return the audit log of a dashboard. Each change is the event ``dashboard.changed`` too.

    Args:
        path: The file; None to keep the last changes in memory.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    return AuditLog(path, clock, event=partial(_log.warning, "dashboard.changed"))


def several_dashboards(
    places: Mapping[str, Place], *, access: Access, audit: AuditLog, clock: Clock = SystemClock()
) -> Fleet:
    """Return the dashboards of several brokers and applications, with an overview of all."""
    names = tuple(places)
    new = partial(Dashboard, access=access, audit=audit, places=names, clock=clock)
    dashboards = {name: new(each.source, each.application, title=name, place=name) for name, each in places.items()}
    return Fleet(dashboards, lambda home: new(None, title="All", home=home))


class DashboardServer(ConsoleServer):
    """Serves a dashboard on an address of its own.

    Args:
        port: 0 for a free one.
    """

    def __init__(self, dashboard: ServedPages, host: str, port: int) -> None:
        super().__init__({"": dashboard.handle}, host, port, part="dashboard", events=_log)
        self._dashboard = dashboard

    def start(self) -> None:
        self._dashboard.prepare(_PREPARE_S)
        super().start()

    def stop(self) -> None:
        """Stop listening, and close the dashboard."""
        super().stop()
        self._dashboard.close()


# --- in an application --------------------------------------------------------------------------


def managed_dashboard(
    broker: Broker,
    actuator: Actuator,
    settings: ManagementSettings,
    title: str,
    accounts: AccessControl | None = None,
) -> Dashboard:
    """Return the dashboard of the application of this process, or of its server. Reading needs a sign-in too.

    Args:
        accounts: The accounts that may sign in beside the token; None: only the token.

    Raises:
        ConfigurationError: The audit log cannot be written.
        UnsupportedError: The broker does not list its topics and groups.
    """
    section = settings.dashboard
    assert settings.token is not None, "the settings are checked"
    token = settings.token.get_secret_value()
    is_loopback = ipaddress.ip_address(settings.address).is_loopback
    access = Access(
        token,
        allow_changes=section.allow_changes,
        reads_need_token=True,
        allowed_hosts=(*section.allowed_hosts, *(() if is_loopback else (settings.address,))),
        accounts=accounts,
        clock=broker.clock,
    )
    path = Path(settings.audit_log) if settings.audit_log is not None else default_audit_path()
    broker.admin()  # an error at the start, not on the first page
    return Dashboard(
        OpenSource(BrokerAccess(broker), title),
        LocalActuator(actuator, token),
        access=access,
        audit=dashboard_audit(path if section.allow_changes else None, broker.clock),
        clock=broker.clock,
    )


def dashboard_accounts(settings: AppSettings) -> AccessControl:
    """Return the accounts of the dashboard of an application, for its context. A reload changes them."""
    return AccessControl(acl_settings(settings.mqtemplate.server.acl))


def application_dashboard(
    broker: Broker, settings: AppSettings, actuator: Actuator, accounts: AccessControl
) -> Dashboard:
    """Return the dashboard of an application, for its context."""
    management = settings.mqtemplate.management
    used = accounts if settings.mqtemplate.server.acl.enabled else None
    return managed_dashboard(broker, actuator, management, management.name or broker.name, used)
