"""Pages of the dashboard for the delayed messages of a RocketMQ cluster, from a scripted broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.console import Access, AuditLog, Dashboard, OpenSource
from mqtemplate.console.delayed import ClusterDelays
from mqtemplate.delay.settings import TopicShape
from mqtemplate.message import Property
from mqtemplate.operations import BrokerAccess, PendingAction, PendingChange
from mqtemplate.operations.delayed import change_limits
from mqtemplate.operations.problems import BrokerReading, Severity, broker_problems
from mqtemplate.pending import BrokerDelays, LevelBacklog
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.brokers.remote.clients import remote
from tests.brokers.remote.system_topics import DAY_MS, SLOT_MS, SystemTopics
from tests.console.pages import TOKEN, Answer, Shop
from tests.waiting import eventually

STATE = (
    '{"table":{"timerReadBehind":"75","timerOffsetBehind":"40000","timerCongestNum":"1234","timerEnqueueTps":"12.5",'
    '"timerDequeueTps":"3.0","scheduleMessageOffset_2":"0,1"}}'
)


METRICS_TOKEN = "metrics-0123456789-abc"


@pytest.fixture
def cluster() -> Iterator[SystemTopics]:
    with SystemTopics() as cluster:
        cluster.script(RequestCode.GET_BROKER_RUNTIME_INFO, lambda request: request.response(body=STATE.encode()))
        cluster.timer("TIMER-1", **{Property.KEYS: "order-1"})
        cluster.timer("TIMER-2", 5, **{Property.KEYS: "order-2"})
        cluster.store(SCHEDULE_TOPIC, 1, **{Property.UNIQ_KEY: "LEVEL-1", Property.KEYS: "order-3"})
        yield cluster


@pytest.fixture
def shop(cluster: SystemTopics, tmp_path: Path) -> Iterator[Shop]:
    with remote(cluster, pending_index=tmp_path / "pending.sqlite") as client:
        access = Access(TOKEN, allow_changes=True, metrics_token=METRICS_TOKEN)
        log = AuditLog(None, SystemClock())
        pages = Dashboard(OpenSource(BrokerAccess(client), "mq1:9876"), access=access, audit=log)
        shop = Shop(None, client, pages, tmp_path)  # type: ignore[arg-type]  # there is no application
        assert shop.get("/sign-in", token=TOKEN).status == 303
        yield shop
        pages.close()


def test_the_first_page_reads_the_brokers_and_lists_timers_and_levels(shop: Shop) -> None:
    shop.page("/delayed")

    text = eventually(
        lambda: found if "order-3" in (found := shop.page("/delayed/list").text) else None, "it is listed"
    )
    assert text is not None
    assert text.index("order-3") < text.index("order-2")
    assert "3 due in this span" in eventually(
        lambda: found if "counting" not in (found := shop.page("/delayed/timeline").text) else "", "it is counted"
    )


def test_the_state_page_says_which_broker_is_late_and_why(shop: Shop) -> None:
    shop.page("/delayed/list")
    text = shop.page("/delayed/status").text

    assert "broker-a late" in text
    assert "40,000 stored timers are not on its wheel yet" in text
    assert "its timer wheel is 75 s behind; it delivers 3 per second" in text
    assert "orders 3" in text
    assert "level 2 1" in text
    assert "pending.sqlite" in text


def test_a_preview_says_what_rocketmq_does_not_guarantee(shop: Shop) -> None:
    access = BrokerAccess(shop.broker)
    cancel = change_limits(access, PendingChange(PendingAction.CANCEL))
    shift = change_limits(access, PendingChange(PendingAction.SHIFT, 60_000))

    assert "due within the next second may be delivered all the same" in cancel[0]
    assert "both are delivered, with equal ids" in shift[0]
    assert "A message with a delay level stays as it is" in cancel[1]


@pytest.mark.parametrize(("behind_ms", "severity"), [(10_000, Severity.WARNING), (75_000, Severity.ERROR)])
def test_a_late_broker_is_a_problem_with_its_cause(behind_ms: int, severity: Severity) -> None:
    late = BrokerDelays(broker="broker-a", has_timers=True, timer_behind_ms=behind_ms, delivered_rate=7)
    on_time = BrokerDelays(broker="broker-b", has_timers=True, levels=(LevelBacklog(level=3, delay_ms=1, pending=9),))

    [problem] = broker_problems(BrokerReading(now_ms=0, delays=(late, on_time)))

    assert problem.severity is severity
    assert problem.text == (
        f"broker broker-a: its timer wheel is {behind_ms // 1_000} s behind; it delivers 7 per second"
    )


def test_pages_of_topics_have_the_shapes_of_their_releases(tmp_path: Path) -> None:
    settings = EmbeddedSettings(topic_shapes={"mails": TopicShape(fair_by="tenant", max_rate=500)})
    clock = VirtualClock()
    with EmbeddedBroker(None, settings, clock) as broker:
        access, log = Access(TOKEN, clock=clock), AuditLog(None, clock)
        pages = Dashboard(OpenSource(BrokerAccess(broker), "embedded"), access=access, audit=log, clock=clock)
        shop = Shop(None, broker, pages, tmp_path)  # type: ignore[arg-type]
        shop.get("/sign-in", token=TOKEN)
        broker.create_topic("orders", 1)
        without = shop.page("/topics").text
        broker.create_topic("mails", 1)
        pages = Dashboard(OpenSource(BrokerAccess(broker), "embedded"), access=access, audit=log, clock=clock)
        shop.dashboard = pages
        listed, shown = shop.page("/topics").text, shop.page("/topics?name=mails").text

    assert "Releases" not in without
    assert "max-rate 500/s, fair-by tenant" in listed
    assert "Releases of delayed messages max-rate 500/s, fair-by tenant" in shown


# --- metrics --------------------------------------------------------------------------------------


def scrape(shop: Shop, address: str = "/metrics", token: str = METRICS_TOKEN) -> Answer:
    """Read the metrics as Prometheus does, which has no session."""
    shop.cookies.clear()
    return shop.request("GET", address, authorization=f"Bearer {token}")


def series(answer: Answer, name: str) -> list[str]:
    """Return the series of one metric, without its prefix."""
    prefix = f"mqtemplate_delay_{name}"
    return [
        line.removeprefix(prefix) for line in answer.html.splitlines() if line.startswith((f"{prefix}{{", prefix + " "))
    ]


def test_prometheus_reads_the_lag_of_timers_and_levels_by_broker(cluster: SystemTopics, shop: Shop) -> None:
    cluster.store(SCHEDULE_TOPIC, 0, stored_ms=SLOT_MS - DAY_MS - 600_000, **{Property.UNIQ_KEY: "LATE"})
    offsets = '"scheduleMessageOffset_1":"0,1","scheduleMessageOffset_2":"0,1"'
    table = STATE.replace('"scheduleMessageOffset_2":"0,1"', offsets)
    cluster.script(RequestCode.GET_BROKER_RUNTIME_INFO, lambda request: request.response(body=table.encode()))

    answer = scrape(shop)

    assert answer.status == 200
    by_level, by_timer = series(answer, "dequeue_lag_seconds")
    assert by_timer == '{mqtemplate_broker="broker-a",mqtemplate_service="delay.timer"} 75.0'
    assert float(by_level.rpartition(" ")[2]) >= 599
    assert series(answer, "enqueue_lag") == ['{mqtemplate_broker="broker-a",mqtemplate_service="delay.timer"} 40000.0']
    assert series(answer, "waiting_timer") == ['{mqtemplate_broker="broker-a"} 1234.0']
    assert series(answer, "waiting_level") == ['{mqtemplate_broker="broker-a"} 2.0']
    assert series(answer, "pending_levels") == [
        '{mqtemplate_broker="broker-a",mqtemplate_level="1"} 1.0',
        '{mqtemplate_broker="broker-a",mqtemplate_level="2"} 1.0',
    ]
    late, on_time = series(answer, "level_lag_seconds")
    assert float(late.rpartition(" ")[2]) >= 599
    assert on_time == '{mqtemplate_broker="broker-a",mqtemplate_level="2"} 0.0'
    assert series(answer, "readable_ratio") == ['{mqtemplate_broker="broker-a"} 1.0']


def test_a_broker_that_does_not_report_its_state_is_a_series_and_no_error(cluster: SystemTopics, shop: Shop) -> None:
    cluster.refuse(RequestCode.GET_BROKER_RUNTIME_INFO, ResponseCode.NO_PERMISSION, "no right")

    answer = scrape(shop)

    assert series(answer, "readable_ratio") == ['{mqtemplate_broker="broker-a"} 0.0']
    assert series(answer, "dequeue_lag_seconds") == []


def test_pending_messages_by_horizon_come_with_the_first_read_of_the_index(shop: Shop) -> None:
    """A scrape must not take as long as that read."""
    before = series(scrape(shop), "pending")
    console = shop.broker.delay_console
    assert console is not None
    console.update_index(lambda count: None)
    shop.dashboard._cluster_delays = ClusterDelays()  # as after the ten seconds between two reads
    after = series(scrape(shop), "pending")

    assert before == []
    assert '{mqtemplate_horizon="7d"} 2.0' in after or '{mqtemplate_horizon="1d"} 3.0' in after


def test_late_deliveries_are_those_since_the_first_scrape_of_a_topic(cluster: SystemTopics, shop: Shop) -> None:
    """One was late before; of three that come then one is, and one was never delayed."""
    cluster.topic("orders", queues=1)
    delays = shop.dashboard._cluster_delays
    cluster.delivered("orders", late_ms=90_000)
    scrape(shop, "/metrics?topic=orders")
    for late_ms in (0, 90_000, None):
        cluster.delivered("orders", late_ms=late_ms)
    delays._next_ms = 0  # as after the ten seconds between two reads
    answer = scrape(shop, "/metrics?topic=orders")

    labels = 'messaging_destination_name="orders",mqtemplate_broker="broker-a"'
    assert series(answer, "lag_seconds_count") == [f"{{{labels}}} 2.0"]
    assert series(answer, "lag_seconds_sum") == [f"{{{labels}}} 90.0"]


def test_who_reads_the_metrics_needs_their_token_or_all_rights(shop: Shop) -> None:
    signed_in = shop.get("/metrics")
    wrong = scrape(shop, token="wrong-0123456789-abcdef")
    none = shop.request("GET", "/metrics")
    by_dashboard_token = scrape(shop, token=TOKEN)

    assert (signed_in.status, wrong.status, none.status, by_dashboard_token.status) == (200, 401, 401, 401)
    assert "Authorization: Bearer TOKEN" in none.html


def test_metrics_that_cannot_be_read_say_why(cluster: SystemTopics, shop: Shop, tmp_path: Path) -> None:
    too_many = scrape(shop, "/metrics?" + "&".join(f"topic=t{number}" for number in range(21)))
    unknown = scrape(shop, "/metrics?topic=nowhere")
    with EmbeddedBroker() as broker:
        access, log = Access(TOKEN), AuditLog(None, SystemClock())
        off = Shop(None, broker, Dashboard(None, access=access, audit=log), tmp_path)  # type: ignore[arg-type]
        refused = scrape(off)
        access = Access(TOKEN, metrics_token=METRICS_TOKEN)
        pages = Dashboard(OpenSource(BrokerAccess(broker), "embedded"), access=access, audit=log)
        ours = scrape(Shop(None, broker, pages, tmp_path))  # type: ignore[arg-type]

    assert (too_many.status, too_many.html) == (
        400,
        "at most 20 topics have their late deliveries measured, got 21\n",
    )
    assert unknown.status == 404
    assert "nowhere" in unknown.html
    assert refused.status == 403
    assert "start the dashboard with --metrics-token-file FILE" in refused.html
    assert (ours.status, ours.html) == (
        501,
        "this broker is none of RocketMQ: its process has /actuator/prometheus\n",
    )
