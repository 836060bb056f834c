"""Topics with their queues and groups."""

from __future__ import annotations

from mqtemplate.admin.values import TopicInfo, TopicKind
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.http.exchange import HttpResponse

_WAIT_S = 30.0


def topics(site: Site, call: Call) -> HttpResponse:
    """Return the list, or one topic."""
    name = call.text("name")
    if name is not None:
        return _topic(site, call, name)
    kind, text = call.text("kind") or "normal", (call.text("search") or "").lower()
    cached = site.cache.get("topics", lambda: _read(site), _WAIT_S)
    everything = [] if cached is None else cached.value
    found = [each for each in everything if kind in ("all", each.kind.value) and text in each.name.lower()]
    kinds = [each.value for each in TopicKind]
    return site.page(call, "topics.html", topics=found, kind=kind, kinds=kinds, rates=site.rates.stored())


def _read(site: Site) -> list[TopicInfo]:
    with site.reading() as admin:
        return admin.topics()


def _topic(site: Site, call: Call, name: str) -> HttpResponse:
    with site.reading() as admin:
        topic = admin.topic(name)
        progress = {group: sum(each.lag for each in admin.progress(group, name)) for group in topic.groups}
    return site.page(call, "topic.html", topic=topic, lags=progress)


ROUTES: Routes = {("GET", "/topics"): topics}
