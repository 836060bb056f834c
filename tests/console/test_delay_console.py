"""Pages of the dashboard for the delayed messages of a RocketMQ cluster, from a scripted broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.console import Access, AuditLog, Dashboard, OpenSource
from mqtemplate.message import Property
from mqtemplate.operations import BrokerAccess, PendingAction, PendingChange
from mqtemplate.operations.delayed import change_limits
from mqtemplate.operations.problems import BrokerReading, Severity, broker_problems
from mqtemplate.pending import BrokerDelays, LevelBacklog
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.brokers.remote.clients import remote
from tests.brokers.remote.system_topics import SystemTopics
from tests.console.pages import TOKEN, Shop
from tests.waiting import eventually

STATE = (
    '{"table":{"timerReadBehind":"75","timerOffsetBehind":"40000","timerCongestNum":"1234","timerEnqueueTps":"12.5",'
    '"timerDequeueTps":"3.0","scheduleMessageOffset_2":"0,1"}}'
)


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
        access, log = Access(TOKEN, allow_changes=True), AuditLog(None, SystemClock())
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
