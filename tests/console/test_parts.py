"""Parts of the dashboard: histogram, cache, live tail, the audit path, snapshots that are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, Thread

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.console import Access, Dashboard, DashboardServer, FolderSource, OpenSource, dashboard_audit, state
from mqtemplate.console import dashboard as dashboard_module
from mqtemplate.console.cache import BackgroundCache, OffsetSample, Rates
from mqtemplate.console.histogram import DAY_MS, HOUR_MS, MINUTE_MS, histogram
from mqtemplate.console.messages import _MAX_STREAMS, events
from mqtemplate.console.site import Site
from mqtemplate.console.state import BrokerState
from mqtemplate.errors import BrokerError, MQTemplateError
from mqtemplate.http.exchange import HttpRequest
from mqtemplate.message import Message, MessageQueue
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.audit import default_audit_path
from mqtemplate.operations.progress import LagTrend
from tests.console.pages import HOST, SCRIPT, Answer, Shop
from tests.waiting import eventually

START_MS = 1_767_225_600_000  # 2026-01-01 in UTC


def bars(buckets: dict[int, int], span_ms: int) -> tuple[str, list[int]]:
    drawn = histogram(buckets, START_MS, START_MS + span_ms, lambda start, end: f"{start}..{end}")
    return drawn.unit, [bar.count for bar in drawn.bars]


def test_the_length_of_bars_follows_the_span() -> None:
    buckets = {START_MS: 1, START_MS + MINUTE_MS: 2, START_MS + HOUR_MS: 4, START_MS + DAY_MS: 8}

    assert bars(buckets, HOUR_MS) == ("minute", [1, 2, *[0] * 58])
    assert bars(buckets, 3 * HOUR_MS) == ("hour", [3, 4, 0])
    assert bars(buckets, 5 * DAY_MS)[0] == "day"
    assert sum(bars(buckets, 5 * DAY_MS)[1]) == 15
    assert bars(buckets, 300 * DAY_MS)[0] == "30 days"


def test_a_bar_leads_into_its_span_and_that_of_a_minute_does_not() -> None:
    hours = histogram({START_MS: 1}, START_MS, START_MS + 3 * HOUR_MS, lambda start, end: f"{start}..{end}")
    minutes = histogram({START_MS: 1}, START_MS, START_MS + HOUR_MS, lambda start, end: "")

    assert [bar.address for bar in hours.bars] == [f"{START_MS}..{START_MS + HOUR_MS}", None, None]
    assert minutes.bars[0].address is None


def test_one_message_beside_a_million_is_visible() -> None:
    drawn = histogram({START_MS: 1, START_MS + HOUR_MS: 10**6}, START_MS, START_MS + 3 * HOUR_MS, lambda *_: "")

    assert [bar.height > 1 for bar in drawn.bars] == [True, True, False]


# --- the cache ----------------------------------------------------------------------------------


def test_the_first_reader_waits_only_as_long_as_it_wants() -> None:
    cache, may_end = BackgroundCache(), Event()

    early = cache.get("key", lambda: may_end.wait(60), 0.0)
    may_end.set()
    late = eventually(lambda: cache.get("key", lambda: False, 1.0), "the value is read")

    assert early is None
    assert late.value is True


@pytest.mark.parametrize("path", ["/topics", "/groups"])
def test_a_list_that_takes_long_to_read_is_not_shown_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    may_end, read = Event(), state._read

    def read_late(site: Site) -> BrokerState:
        may_end.wait(60)
        return read(site)

    monkeypatch.setattr(state, "_read", read_late)
    with EmbeddedBroker() as broker:
        broker.create_topic("orders")
        audit = dashboard_audit(tmp_path / "audit.jsonl", SystemClock())
        source = OpenSource(BrokerAccess(broker), "shop")
        dashboard = Dashboard(source, access=Access(reads_need_token=False), audit=audit)

        def page() -> Answer:
            request = HttpRequest(method="GET", path=path, headers={"host": HOST})
            return Answer(dashboard.handle(request))

        early = page()
        may_end.set()
        late = eventually(lambda: "reading the broker" not in (now := page()).text and now, "the broker is read")
        dashboard.close()

    assert "reading the broker … Load this page again." in early.text
    assert 'data-refresh="1"' in early.html
    assert "matches" not in early.text
    assert "orders" in late.text if path == "/topics" else "No group matches." in late.text
    assert "data-refresh" not in late.html


def test_an_error_of_a_read_reaches_its_readers() -> None:
    def read() -> int:
        raise BrokerError("no answer")

    def read_badly() -> int:
        return 1 // 0

    with pytest.raises(BrokerError, match="no answer"):
        BackgroundCache().get("key", read, 60.0)
    with pytest.raises(MQTemplateError, match="ZeroDivisionError"):
        BackgroundCache().get("key", read_badly, 60.0)


def test_a_change_empties_the_cache() -> None:
    cache = BackgroundCache()
    values = iter([1, 2])
    assert cache.get("key", lambda: next(values), 60.0).value == 1  # type: ignore[union-attr]
    assert cache.get("key", lambda: next(values), 60.0).value == 1  # type: ignore[union-attr]

    cache.clear()

    assert cache.get("key", lambda: next(values), 60.0).value == 2  # type: ignore[union-attr]


def test_a_page_may_leave_the_reading_to_a_later_part() -> None:
    """A thread that reads beside the first page would delay its paint."""
    cache = BackgroundCache()

    assert cache.get("key", lambda: pytest.fail("it was read"), None) is None
    assert cache.get("key", lambda: 1, 60.0).value == 1  # type: ignore[union-attr]
    assert cache.get("key", lambda: 2, None).value == 1  # type: ignore[union-attr]


# --- rates --------------------------------------------------------------------------------------


QUEUE = MessageQueue("orders", "broker-a", 0)


def test_rates_are_those_of_the_last_minute() -> None:
    rates = Rates()
    for second in range(0, 100, 10):
        rates.add(OffsetSample(second * 1_000, {"orders": second * 3}, {"billing": {QUEUE: second}}))
    rates.add(OffsetSample(90_500, {"orders": 10_000}))  # less than a second after the last one

    assert rates.stored() == {"orders": 3.0}
    assert rates.consumed() == {"billing": 1.0}
    last = rates.history()[-1]
    assert (last.time_ms, last.stored, last.consumed, last.pending) == (90_000, 3.0, 1.0, None)


def test_the_offset_at_which_a_group_starts_is_no_consumption() -> None:
    """A new group starts at the end of a queue with 200,000 messages, and then consumes 30."""
    other = MessageQueue("orders", "broker-a", 1)
    rates = Rates()
    rates.add(OffsetSample(0))
    rates.add(OffsetSample(10_000, consumed={"billing": {QUEUE: 200_000}}))
    at_the_start = rates.consumed()
    rates.add(OffsetSample(20_000, consumed={"billing": {QUEUE: 200_000, other: 100_000}}))
    rates.add(OffsetSample(30_000, consumed={"billing": {QUEUE: 200_020, other: 100_010}}))

    assert at_the_start == {"billing": 0.0}
    assert rates.consumed() == {"billing": 1.0}


def test_a_topic_that_was_created_again_has_no_negative_rate() -> None:
    rates = Rates()
    rates.add(OffsetSample(0, {"orders": 100}))
    rates.add(OffsetSample(10_000, {"orders": 5}))

    assert rates.stored() == {"orders": 0.0}


def test_the_trend_of_a_lag_is_that_of_the_last_minute() -> None:
    rates = Rates()
    first = rates.lag_trends()
    for second in range(0, 100, 10):
        rates.add(OffsetSample(second * 1_000, lags={"billing": second * 3, "mails": 100 - second}))
    rates.add(OffsetSample(100_000, lags={"billing": 300, "mails": 0, "new": 5}))

    assert first == {}
    assert rates.lag_trends() == {"billing": LagTrend(120, 300, 60_000), "mails": LagTrend(60, 0, 60_000)}


# --- the live tail ------------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_new_messages_are_events(shop: Shop) -> None:
    shop.send("orders", b"before")
    answer = shop.get("/tail/stream", topic="orders", tag="paid")
    body = answer.response.body
    assert not isinstance(body, bytes)
    shop.send("orders", b"other", tag="open")
    shop.send("orders", SCRIPT.encode(), "order-1", tag="paid")

    start, event = next(body), next(body)
    body.close()  # type: ignore[attr-defined]

    assert answer.headers["Content-Type"] == "text/event-stream"
    assert start == b"retry: 2000\n\n"
    name, data = event.decode().strip().split("\n")
    assert name == "event: message"
    assert json.loads(data.removeprefix("data: ")) == {
        "time": "2026-01-01 00:00:00", "exact": "2026-01-01T00:00:00.000+00:00", "topic": "orders",
        "id": json.loads(data[6:])["id"], "tag": "paid",
        "keys": "order-1", "queue": json.loads(data[6:])["queue"], "body": SCRIPT, "is_text": True,
    }  # fmt: skip


def test_a_tail_continues_after_a_pause_and_ends_after_ten_minutes(shop: Shop) -> None:
    site, seconds = shop.dashboard._site, iter([0.0, 1.0, 2.0, 700.0])
    shop.send("orders")
    pauses: list[float] = []

    def pause(length_s: float) -> None:
        pauses.append(length_s)
        shop.send("orders")

    found = list(events(site, "orders", None, {}, pause, lambda: next(seconds)))

    assert [part.partition(b"\n")[0] for part in found] == [
        b"retry: 2000", b"event: message", b": ", b"event: message", b": "
    ]  # fmt: skip
    assert pauses == [1.0, 1.0]


def test_a_tail_of_a_missing_topic_is_an_error(shop: Shop) -> None:
    assert shop.get("/tail/stream", topic="nothing").status == 404


def test_the_number_of_tails_is_limited(shop: Shop) -> None:
    shop.send("orders")
    opened = []
    for _ in range(_MAX_STREAMS):
        body = shop.get("/tail/stream", topic="orders").response.body
        assert not isinstance(body, bytes)
        next(body)
        opened.append(body)

    refused = shop.get("/tail/stream", topic="orders")
    for body in opened:
        body.close()  # type: ignore[attr-defined]
    for _ in range(2 * _MAX_STREAMS):
        shop.get("/tail/stream", topic="orders").response.close()  # none of its events was read

    assert refused.status == 400
    assert "8 pages follow topics already; close one" in refused.text


# --- files --------------------------------------------------------------------------------------


def test_the_audit_log_is_in_the_state_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    named = default_audit_path()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")

    assert named == Path("/state/mqtemplate/audit.jsonl")
    assert default_audit_path() == Path("/home/me/.local/state/mqtemplate/audit.jsonl")


def test_an_old_snapshot_is_replaced_beside_its_readers(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "store") as owner:
        owner.sends.send(Message("orders", b"x"))
        source = FolderSource(tmp_path / "store", least_age_s=0, cost_factor=0)
        owner.sends.send(Message("invoices", b"x"))

        def topics() -> list[str]:
            with source.reading() as access:
                return access.admin.topic_names()

        before = topics()
        eventually(lambda: "invoices" in topics(), "a new snapshot is read")
        source.close()

    assert "orders" in before
    assert "invoices" not in before


def test_closing_waits_for_who_reads(tmp_path: Path) -> None:
    """The overview is read in the background: Ctrl-C must not close the files below it."""
    with EmbeddedBroker(tmp_path / "store") as owner:
        owner.sends.send(Message("orders", b"x"))
    source, found, is_read, may_read = FolderSource(tmp_path / "store"), list[str](), Event(), Event()

    def read() -> None:
        with source.reading() as access:
            is_read.set()
            may_read.wait(60)
            found.extend(access.admin.topic_names())

    reader, closer = Thread(target=read), Thread(target=source.close)
    reader.start()
    is_read.wait(60)
    closer.start()
    closer.join(0.1)
    waits = closer.is_alive()
    may_read.set()
    for each in (reader, closer):
        each.join(60)

    assert waits
    assert "orders" in found


def test_a_server_of_pages_has_read_the_broker_when_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading beside the first page would make it slow. A broker that takes longer does not delay the start further."""
    reads, may_end, read = list[str](), Event(), state._read
    may_end.set()

    def counted(site: Site) -> BrokerState:
        may_end.wait(60)
        reads.append("read")
        return read(site)

    monkeypatch.setattr(state, "_read", counted)
    monkeypatch.setattr(dashboard_module, "_PREPARE_S", 60.0)
    with EmbeddedBroker() as broker:
        broker.create_topic("orders")
        access = Access(reads_need_token=False)

        def dashboard() -> Dashboard:
            source = OpenSource(BrokerAccess(broker), "shop")
            return Dashboard(source, access=access, audit=dashboard_audit(None, SystemClock()))

        server = DashboardServer(first := dashboard(), "127.0.0.1", 0)
        server.start()
        at_start = list(reads)
        page = Answer(first.handle(HttpRequest(method="GET", path="/", headers={"host": HOST})))
        server.stop()
        may_end.clear()
        monkeypatch.setattr(dashboard_module, "_PREPARE_S", 0.01)
        slow = DashboardServer(dashboard(), "127.0.0.1", 0)
        slow.start()
        may_end.set()
        slow.stop()

    assert at_start == ["read"]
    assert "reading the broker" not in page.text
