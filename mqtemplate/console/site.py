"""The dashboard as its pages see it: one request, the broker, the application, access, and the frame of each page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

from mqtemplate.console.access import Access
from mqtemplate.console.cache import BackgroundCache, Rates
from mqtemplate.console.jobs import Job, Jobs, Work
from mqtemplate.console.rendering import FORM_END, render
from mqtemplate.console.sources import BrokerSource
from mqtemplate.errors import MessageError, UnknownNameError, UnsupportedError
from mqtemplate.http.exchange import HttpRequest, HttpResponse
from mqtemplate.numbers import parse_number
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import AuditLog
from mqtemplate.operations.bulk import parse_time
from mqtemplate.operations.changes import Change, UnconfirmedChangeError, carry_out, check_confirmed
from mqtemplate.server.acl.settings import AccountRole

_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 3_000
_REPEATED = frozenset({"handle", "letter", "name", "value"})
_MAX_DIGITS = 14
"""Epoch milliseconds with 14 digits are before the year 5139; Python's dates end in 9999."""

HTML = "text/html; charset=utf-8"

_PAGES = (
    # path, title, needs a broker
    ("/", "Overview", False),
    ("/delayed", "Delayed", True),
    ("/messages", "Messages", True),
    ("/topics", "Topics", True),
    ("/groups", "Groups", True),
    ("/dead-letters", "Dead letters", True),
    ("/tail", "Live tail", True),
    ("/levels", "Delay levels", True),
    ("/changes", "Changes", False),
    ("/listeners", "Listeners", False),
    ("/schedules", "Schedules", False),
    ("/hand-over", "Hand-over", False),
    ("/copy", "Copy", False),
    ("/lateness", "Lateness", False),
    ("/configuration", "Configuration", False),
)
OF_ADMINS = frozenset({"/configuration", "/hand-over"})
"""Pages of which an account without the role admin sees nothing. Changes of topics and groups are refused to it too."""
_THEMES = ("light", "dark")
_THEME_COOKIE = "mqtemplate_theme="


@dataclass(frozen=True)
class Call:
    """A request with its query and form, and the addresses of pages."""

    request: HttpRequest
    query: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        # Empty fields of a form for a search mean: no filter.
        object.__setattr__(self, "query", {name: value.strip() for name, value in self.request.query if value.strip()})

    # --- values --------------------------------------------------------------------------------

    def text(self, name: str) -> str | None:
        """Return a value of the query; None if it is missing or empty."""
        return self.query.get(name)

    def needed(self, name: str) -> str:
        """Return a value of the query.

        Raises:
            MessageError: It is missing.
        """
        value = self.query.get(name)
        if value is None:
            raise MessageError(f"the address lacks {name}=…")
        return value

    def time_ms(self, name: str) -> int | None:
        """Return a time of the query (epoch ms)."""
        return time_of(self.query.get(name), name)

    @cached_property
    def form(self) -> Sequence[tuple[str, str]]:
        """Names and values of the form in the body.

        Raises:
            MessageError: The body is not a form, or has too many fields.
        """
        content_type = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != _FORM:
            raise MessageError(f"a change must be sent as {_FORM}, got {content_type or 'nothing'}")
        try:
            body = self.request.body.decode()
            return parse_qsl(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError as exc:
            raise MessageError(f"the form cannot be read: {exc}; it may have {_MAX_FIELDS} fields") from exc

    def check_complete(self) -> None:
        """Check that the whole form has arrived.

        Raises:
            MessageError: Its last field is missing, or it has a field twice.
        """
        if self.fields(FORM_END[0]) != [FORM_END[1]]:
            raise MessageError(
                "the end of the form is missing, so nothing was changed; reload the page, and send it again"
            )
        for name in {key for key, _ in self.form} - _REPEATED:
            self.field(name)

    def field(self, name: str) -> str:
        """Return the value of a field of the form; empty if it is missing.

        Raises:
            MessageError: It is given twice.
        """
        found = self.fields(name)
        if len(found) > 1:
            raise MessageError(f"the form has {name} {len(found)} times, allowed is once")
        return found[0] if found else ""

    def needed_field(self, name: str) -> str:
        """Return the value of a field of the form, without spaces at its ends.

        Raises:
            MessageError: It is empty.
        """
        value = self.field(name).strip()
        if not value:
            raise MessageError(f"the field {name} is empty; fill it in")
        return value

    def fields(self, name: str) -> list[str]:
        """Return all values of a field of the form."""
        return [value for key, value in self.form if key == name]

    def number_field(self, name: str) -> int:
        """Return a whole number of the form; 0 if it is missing.

        Raises:
            MessageError: It is not a number.
        """
        text = self.field(name) or "0"
        number = parse_number(text)
        if number is None or number < 0 or len(text) > _MAX_DIGITS:
            raise MessageError(f"{name} must be a whole number, got {text[:40]!r}")
        return number

    def time_field(self, name: str) -> int | None:
        """Return a time of the form (epoch ms)."""
        return time_of(self.field(name), name)

    def action_field(self, allowed: Iterable[str]) -> str:
        """Return the action of the form.

        Raises:
            MessageError: It is not an allowed one.
        """
        action, names = self.field("action"), list(allowed)
        if action not in names:
            raise MessageError(f"action must be one of {', '.join(names)}, got {action!r}")
        return action

    def given_fields(self, *names: str) -> list[tuple[str, str]]:
        """Return the fields of the form with these names that are not empty."""
        return [(name, self.field(name)) for name in names if self.field(name)]

    def scope_field(self) -> str:
        """Return ``chosen`` or ``all``: whether a change is of the ticked messages, or of all that match.

        Raises:
            MessageError: It is neither.
        """
        scope = self.field("scope")
        if scope not in ("chosen", "all"):
            raise MessageError(f"scope must be chosen or all, got {scope!r}")
        return scope

    def previewed(self) -> int:
        """Return the number of messages that the preview of a change showed.

        Raises:
            MessageError: There was no preview.
        """
        if not self.field("expected"):
            raise MessageError("a change needs its preview first")
        return self.number_field("expected")

    # --- addresses -----------------------------------------------------------------------------

    def url(self, path: str, /, **query: object) -> str:
        """Return the address of a page. Values that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return f"{self.request.mount}{quote(path)}{'?' + urlencode(given) if given else ''}"

    def same_page(self, /, **query: object) -> str:
        """Return the address of this page with other values."""
        return self.url(self.request.path or "/", **{**self.query, **query})


def time_of(text: str | None, name: str) -> int | None:
    """Return a time (epoch ms): of digits, or a local time such as ``2026-01-31T08:00``; None without a text.

    Raises:
        MessageError: The text is not a time.
    """
    if not text:
        return None
    time_ms = None if text.isdecimal() and len(text) > _MAX_DIGITS else parse_time(text)
    if time_ms is None:
        raise MessageError(f"{name} must be a time such as 2026-01-31T08:00, or epoch milliseconds, got {text[:40]!r}")
    return time_ms


# --- the site -----------------------------------------------------------------------------------


class ApplicationDocuments(Protocol):
    """Documents of a running application, and changes of its listeners."""

    @property
    def address(self) -> str:
        """Address of the actuator, for a reader."""

    def get(self, path: str) -> Any:
        """Return a document, such as ``listeners``.

        Raises:
            UnknownNameError: There is no such document.
            BrokerError: The application does not answer, or refuses.
        """

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """Send a change, and return the document after it. Raises as `get`."""

    def of(self, account: str) -> ApplicationDocuments:
        """Return these documents for an account: the application logs its changes with the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The dashboard of one broker, one application, or both.

    Attributes:
        title: Name for a reader.
        application: Documents of a running application; None without one.
        place: Name among several dashboards on one address, which is the last part of the mount; empty for a single
            one, and for the overview of all.
        places: The names of all of them; none for a single one.
    """

    title: str
    source: BrokerSource | None
    application: ApplicationDocuments | None
    access: Access
    audit: AuditLog
    cache: BackgroundCache
    jobs: Jobs
    rates: Rates
    place: str = ""
    places: Sequence[str] = ()

    # --- the broker and the application --------------------------------------------------------

    def reading(self) -> AbstractContextManager[BrokerAccess]:
        """Return the administration of the broker for reading, for a ``with`` block.

        Raises:
            UnsupportedError: The dashboard has no broker.
        """
        return self._source().reading()

    def changing(self) -> AbstractContextManager[BrokerAccess]:
        """Return the administration of the broker for changes; see `BrokerSource.changing`."""
        return self._source().changing()

    def _source(self) -> BrokerSource:
        if self.source is None:
            raise UnsupportedError(
                "this dashboard shows an application without its broker; start it with --store or --name-server too"
            )
        return self.source

    def document(self, path: str) -> Any:
        """Return a document of the application; None if there is no application, or it does not have the document."""
        if self.application is None:
            return None
        try:
            return self.application.get(path)
        except UnknownNameError:
            return None

    # --- responses -----------------------------------------------------------------------------

    def page(self, call: Call, template: str, status: int = 200, **values: Any) -> HttpResponse:
        """Return a page in the frame of the dashboard."""
        session = self.access.session_of(call.request)
        is_signed_in = session is not None
        role = self.access.role_of(session)
        may_change = self.access.allow_changes and is_signed_in and role is not AccountRole.VIEWER
        home = call.request.mount.removesuffix(place_path(self.place)) if self.place else call.request.mount
        frame = {
            "site": self,
            "home": f"{home}/",
            "places": [
                (name, f"{home}{place_path(name)}/") for name in self.places if self.access.may_read(call.request)
            ],
            "title": self.title if is_signed_in or not self.access.reads_need_token else "mqtemplate",
            "call": call,
            "url": call.url,
            "pages": self._pages(role),
            "is_signed_in": is_signed_in,
            "account": None if session is None or session.account is None else session.account.access_key,
            "role": role.value,
            "has_accounts": self.access.has_accounts,
            "may_search": self.source is not None and self.access.may_read(call.request),
            "may_change": may_change,
            "may_administer": may_change and role is AccountRole.ADMIN,
            "form_token": "" if session is None else session.form_token,
            "theme": _theme(call),
        }
        return HttpResponse(status, render(template, frame | values), HTML)

    def _pages(self, role: AccountRole) -> list[tuple[str, str, bool]]:
        """Return the pages of the navigation for a user with this role; none on the overview of several places."""
        hidden = () if role is AccountRole.ADMIN or not self.access.has_accounts else OF_ADMINS
        shown = () if self.places and not self.place else _PAGES
        return [each for each in shown if (self.source is not None or not each[2]) and each[0] not in hidden]

    def redirect(self, address: str, *headers: tuple[str, str]) -> HttpResponse:
        """Return a redirect to another page, after a change."""
        return HttpResponse(303, b"", HTML, (("Location", address), *headers))

    def start_change(
        self,
        call: Call,
        build: Callable[[BrokerAccess], Change],
        back: str,
        preview_again: Callable[[str], HttpResponse],
    ) -> HttpResponse:
        """Start a change that a preview has shown. Return a redirect to its page.

        Args:
            build: Returns the change as it is now.
            preview_again: Returns the preview page with a sentence at its top: the change reaches more by now.

        Raises:
            MessageError: There was no preview.
        """
        expected, remote, place = call.previewed(), call.request.remote, self._source().label
        with self.reading() as access:
            planned = build(access)
            try:
                check_confirmed(planned, expected)
            except UnconfirmedChangeError as exc:
                return preview_again(str(exc))
            title, total = planned.title, planned.preview.count

        def work(job: Job) -> str:
            with self.changing() as access:
                made = carry_out(
                    build(access), self.audit, remote, place=place, expected=expected, on_progress=job.advance
                )
            return f"{made.text}; this is change {made.id}"

        return self.start_job(call, title, total, back, work)

    def start_job(self, call: Call, title: str, total: int | None, back: str, work: Work) -> HttpResponse:
        """Start a job, and return a redirect to its page.

        Raises:
            MessageError: Another job is running.
        """

        def run(job: Job) -> str:
            try:
                return work(job)
            finally:
                self.cache.clear()

        job = self.jobs.start(title, total, back, run)
        return self.redirect(call.url("/jobs", id=job.id))


Page: TypeAlias = Callable[[Site, Call], HttpResponse]
"""Function that returns a page, or makes a change."""

Routes: TypeAlias = dict[tuple[str, str], Page]
"""Method and path -> page."""


def place_path(name: str) -> str:
    """Return the path of one of several dashboards."""
    return f"/at/{quote(name)}"


def _theme(call: Call) -> str:
    cookies = call.request.headers.get("cookie", "")
    found = next((part.strip() for part in cookies.split(";") if part.strip().startswith(_THEME_COOKIE)), "")
    theme = found.removeprefix(_THEME_COOKIE)
    return theme if theme in _THEMES else ""


def merged(routes: Sequence[Routes]) -> Routes:
    """Return several tables of routes as one."""
    found: Routes = {}
    for each in routes:
        assert not found.keys() & each.keys(), "two pages have one path"
        found |= each
    return found


class ServedPages(Protocol):
    """Pages that a server of their own serves: one dashboard, or several."""

    def prepare(self, wait_s: float = 0.0) -> None:
        """Do what would delay the first page, but do not wait longer than *wait_s* for a broker."""

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request."""

    def close(self) -> None:
        """Close what the pages have opened."""


# --- changes with a preview ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangeForm:
    """A change that a form describes.

    Attributes:
        build: Returns the change as it is now.
        heading: Title of the preview, and its button.
        fields: Names of the fields of the form.
        back: Address of the page to go back to.
        after: Address of the page after the change.
    """

    build: Callable[[BrokerAccess], Change]
    heading: str
    fields: Sequence[str]
    back: str
    after: str


def change_pages(path: str, read: Callable[[Call], ChangeForm]) -> Routes:
    """Return two pages: the preview of a change, below the path, and the change itself.

    Args:
        read: Reads the form.
    """

    def preview(site: Site, call: Call) -> HttpResponse:
        return _change_preview(site, call, read(call), path)

    def apply(site: Site, call: Call) -> HttpResponse:
        form = read(call)
        again = partial(_change_preview, site, call, form, path)
        return site.start_change(call, form.build, form.after, again)

    return {("POST", f"{path}/preview"): preview, ("POST", path): apply}


def _change_preview(site: Site, call: Call, form: ChangeForm, path: str, problem: str = "") -> HttpResponse:
    with site.reading() as access:
        change = form.build(access)
        shown, title = change.preview, change.title
    return site.page(
        call,
        "change_preview.html",
        409 if problem else 200,
        heading=form.heading,
        request=title,
        preview=shown,
        problem=problem,
        address=call.url(path),
        fields=call.given_fields(*form.fields),
        button=form.heading,
        back=form.back,
    )
