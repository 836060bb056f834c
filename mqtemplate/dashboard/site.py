"""Parts that all pages share: the broker, the application, access, and the frame of each page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from mqtemplate.actuator.client import ApplicationDocuments
from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.dashboard.access import Access
from mqtemplate.dashboard.audit import AuditLog
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.jobs import Job, Jobs, Work
from mqtemplate.dashboard.rendering import render
from mqtemplate.dashboard.sources.broker_source import BrokerSource
from mqtemplate.dashboard.sources.cache import BackgroundCache
from mqtemplate.dashboard.sources.rates import Rates
from mqtemplate.errors import UnknownNameError, UnsupportedError
from mqtemplate.http.exchange import HttpResponse

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
    ("/listeners", "Listeners", False),
    ("/schedules", "Schedules", False),
    ("/lateness", "Lateness", False),
    ("/configuration", "Configuration", False),
)
_THEMES = ("light", "dark")
_THEME_COOKIE = "mqtemplate_theme="


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The dashboard of one broker, one application, or both.

    Attributes:
        title: Name for a reader.
        application: Documents of a running application; None without one.
    """

    title: str
    source: BrokerSource | None
    application: ApplicationDocuments | None
    access: Access
    audit: AuditLog
    cache: BackgroundCache
    jobs: Jobs
    rates: Rates

    # --- the broker and the application --------------------------------------------------------

    def reading(self) -> AbstractContextManager[BrokerAdmin]:
        """Return the administration of the broker for reading, for a ``with`` block.

        Raises:
            UnsupportedError: The dashboard has no broker.
        """
        return self._source().reading()

    def changing(self) -> AbstractContextManager[BrokerAdmin]:
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
        may_change = self.access.allow_changes and is_signed_in
        frame = {
            "site": self,
            "title": self.title if is_signed_in or not self.access.reads_need_token else "mqtemplate",
            "call": call,
            "url": call.url,
            "pages": [each for each in _PAGES if self.source is not None or not each[2]],
            "is_signed_in": is_signed_in,
            "may_change": may_change,
            "form_token": "" if session is None else session.form_token,
            "theme": _theme(call),
        }
        return HttpResponse(status, render(template, frame | values), HTML)

    def redirect(self, address: str, *headers: tuple[str, str]) -> HttpResponse:
        """Return a redirect to another page, after a change."""
        return HttpResponse(303, b"", HTML, (("Location", address), *headers))

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
