"""Several brokers and applications in one console: an overview of all, and the dashboard of each below its name."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import quote

from mqtemplate.console.cache import Cached
from mqtemplate.console.site import ApplicationDocuments, Call, Page, ServedPages, Site, place_path
from mqtemplate.console.sources import BrokerSource
from mqtemplate.console.state import application_of, state_of
from mqtemplate.errors import MQTemplateError
from mqtemplate.http.exchange import HttpRequest, HttpResponse, below
from mqtemplate.operations.problems import Problem, ProblemKind, Severity, broker_problems, errors_first

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """One broker, one application, or both, under a name."""

    source: BrokerSource | None = None
    application: ApplicationDocuments | None = None


@dataclass(frozen=True, slots=True)
class PlaceSummary:
    """One place on the overview of all.

    Attributes:
        parts: What it shows: addresses of the broker and of the application.
        problems: Its problems of now, errors first; the first one may be that it does not answer.
        lag: Lag of all groups; None if it is not known.
        letters: Number of open dead letters; None if it is not known.
        is_read: False while nothing is known yet.
    """

    name: str
    address: str
    parts: tuple[str, ...]
    problems: tuple[Problem, ...]
    lag: int | None
    letters: int | None
    is_read: bool


class PlacePages(ServedPages, Protocol):
    """The dashboard of one place."""

    def site_of(self, call: Call) -> Site:
        """Return the dashboard as the user of a request sees it."""


class Fleet:
    """Pages for several brokers and applications, on an address of its own.

    One that does not answer has an error on its pages and a line on the overview, and does not delay the others. The
    sign-in is for all of them, and so are the rights of an account.

    Args:
        dashboards: By the name of the place, which each of them has too.
        new_root: Returns the pages outside of all places: it gets the first page.
    """

    def __init__(self, dashboards: Mapping[str, PlacePages], new_root: Callable[[Page], ServedPages]) -> None:
        self._dashboards = dict(dashboards)
        self._root = new_root(self._overview)

    def prepare(self, wait_s: float = 0.0) -> None:
        """Compile the pages, and read all brokers; wait for all of them no longer than *wait_s*."""
        end_s = time.monotonic() + wait_s
        for each in (self._root, *self._dashboards.values()):
            each.prepare()
        for each in self._dashboards.values():
            each.prepare(max(0.0, end_s - time.monotonic()))

    def close(self) -> None:
        """Stop the running jobs, and close the brokers."""
        for each in self._dashboards.values():
            each.close()

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request."""
        for name, dashboard in self._dashboards.items():
            path = below(request.path, place_path(name)) if quote(name) == name else None
            if path is None:
                continue
            if path == "/sign-in":  # the session is for all of them
                return self._root.handle(dataclasses.replace(request, path=path))
            if request.method == "GET" and any(key == "token" for key, _ in request.query):
                break
            mount = f"{request.mount}{place_path(name)}"
            return dashboard.handle(dataclasses.replace(request, path=path or "/", mount=mount))
        return self._root.handle(request)

    def _overview(self, site: Site, call: Call) -> HttpResponse:
        """Return the page of all places with their problems."""
        found = [_summary(call, name, each.site_of(call)) for name, each in self._dashboards.items()]
        return site.page(call, "fleet.html", places_found=found, is_read=all(each.is_read for each in found))


def _summary(call: Call, name: str, site: Site) -> PlaceSummary:
    problems: list[Problem] = []
    is_read, lag, letters = True, None, None
    if site.source is not None:
        state = _value(lambda: state_of(site), problems)
        is_read = state is not None or bool(problems)
        if state is not None:
            lag, letters = state.reading.lag, sum(state.reading.letters.values())
            problems += broker_problems(state.reading, site.rates.lag_trends())
    if site.application is not None:
        before = len(problems)
        found = _value(lambda: application_of(site), problems)
        is_read = is_read and (found is not None or len(problems) > before)
        problems += [] if found is None else found.problems
    parts = (site.source.label if site.source else "", site.application.address if site.application else "")
    return PlaceSummary(
        name,
        call.url(f"{place_path(name)}/"),
        tuple(filter(None, parts)),
        tuple(errors_first(problems)),
        lag,
        letters,
        is_read,
    )


def _value(get: Callable[[], Cached[T] | None], problems: list[Problem]) -> T | None:
    """Return a value; None if it is not known yet, or if there is a problem with it."""
    try:
        cached = get()
    except MQTemplateError as exc:
        problems.append(Problem(Severity.ERROR, ProblemKind.HEALTH, f"it does not answer: {exc}"))
        return None
    return None if cached is None else cached.value
