"""Consumer groups with lag, members, subscriptions and progress."""

from __future__ import annotations

from mqtemplate.admin.values import GroupInfo
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.errors import UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_WAIT_S = 30.0


def groups(site: Site, call: Call) -> HttpResponse:
    """Return the list, or one group."""
    name = call.text("name")
    if name is not None:
        return _group(site, call, name)
    text = (call.text("search") or "").lower()
    cached = site.cache.get("groups", lambda: _read(site), _WAIT_S)
    everything = [] if cached is None else cached.value
    found = [each for each in everything if text in each.name.lower()]
    return site.page(call, "groups.html", groups=found, rates=site.rates.consumed())


def _read(site: Site) -> list[GroupInfo]:
    with site.reading() as admin:
        found = []
        for name in admin.group_names():
            try:
                found.append(admin.group(name))
            except UnknownNameError:  # it was deleted meanwhile
                continue
        return found


def _group(site: Site, call: Call, name: str) -> HttpResponse:
    with site.reading() as admin:
        group = admin.group(name)
        has_letters = DLQ_TOPIC_PREFIX + name in admin.topic_kinds()
        now_ms = admin.broker.clock.now_ms()
    return site.page(call, "group.html", group=group, has_letters=has_letters, now_ms=now_ms)


ROUTES: Routes = {("GET", "/groups"): groups}
