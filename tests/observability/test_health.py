"""Health of the broker, the disk, the listeners, lag and lateness."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate import MQApplication, RocketMQTemplate, VirtualClock, message_listener
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker
from mqtemplate.converters.readable import time_text
from mqtemplate.errors import SendError, StoreError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.observability import ComponentHealth, HealthChecks, HealthSettings, Observability, Status, broker_checks
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import DiskUsage
from mqtemplate.testing import Harness
from tests.store.faulty_disk import FaultyDisk, never
from tests.waiting import eventually

from .conftest import Observe


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...


@pytest.mark.feature("14.3")
def test_all_components_of_an_application_are_up(observe: Observe) -> None:
    health = observe(bill).app.get(HealthChecks).read()

    assert health.status is Status.UP
    assert set(health.components) == {"broker", "flush", "listeners", "handlers", "lag", "lateness"}


def test_a_broker_that_is_closed_is_down() -> None:
    broker = EmbeddedBroker()
    checks = HealthChecks(broker_checks(broker, HealthSettings()), is_virtual=True)

    health = checks.read()

    assert health.status is Status.DOWN
    assert "is not running" in str(health.components["broker"].details["error"])


@pytest.mark.feature("14.3")
def test_a_flush_that_fails_is_down_until_one_succeeds(observe: Observe) -> None:
    app = observe().app
    broker = app.broker
    assert isinstance(broker, EmbeddedBroker)
    broker.store.group_commit._end_lead(0, StoreError("the disk failed"))
    down = app.get(HealthChecks).read().components["flush"]
    app.template.sync_send("orders", "x")
    up = app.get(HealthChecks).read().components["flush"]

    assert (down.status, down.details["error"]) == (Status.DOWN, "the disk failed")
    assert up.status is Status.UP


def test_a_full_disk_is_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store")
    with EmbeddedBroker(folder) as broker:

        def read(percent: int) -> ComponentHealth:
            checks = broker_checks(broker, HealthSettings(max_disk_used_percent=percent))
            return HealthChecks(checks, is_virtual=True).read().components["diskSpace"]

        broker.store.disk.read = lambda: DiskUsage(used=7_000_000, free=3_000_000)
        assert (read(70).status, read(69).status) == (Status.UP, Status.DOWN)
        assert read(69).details == {
            "path": str(folder),
            "allowedPercent": 69,
            "usedPercent": 70.0,
            "freeBytes": 3_000_000,
            "limitFreeBytes": 1_500_000,
            "storeBytes": read(69).details["storeBytes"],
        }


def test_the_figures_of_a_disk_with_space_are_true(tmp_path: Path) -> None:
    """16 more files of the log fit, so no limit counts; that must not look like an empty disk."""
    terabyte = 1 << 40
    with EmbeddedBroker(tmp_path) as broker:
        broker.sends.send(Message("orders", b"x"))
        broker.store.disk.read = lambda: DiskUsage(used=96 * terabyte, free=4 * terabyte)

        disk = HealthChecks(broker_checks(broker, HealthSettings()), is_virtual=True).read().components["diskSpace"]
        metrics = broker.metrics.snapshot()

    assert (disk.status, disk.details["usedPercent"], disk.details["freeBytes"]) == (Status.UP, 96.0, 4 * terabyte)
    assert (metrics["store.disk_used"], metrics["store.disk_free"]) == (0.96, 4 * terabyte)
    assert metrics["store.disk_limit_free"] == 16 * (64 << 20)
    assert isinstance(metrics["store.size"], int)
    assert metrics["store.size"] > 0


def test_health_is_down_while_the_disk_has_no_space_for_messages(tmp_path: Path) -> None:
    """From the first send that fails, with the cause and what helps, until one succeeds."""
    disk = FaultyDisk()
    store_files = FolderStoreFiles(tmp_path, disk)
    with EmbeddedBroker(tmp_path, clock=VirtualClock(), store_files=store_files) as broker:
        broker.create_topic("orders")
        checks = HealthChecks(broker_checks(broker, HealthSettings()), is_virtual=True)
        broker.store.disk.read = lambda: DiskUsage(used=7_000_000, free=3_000_000)
        disk.judge = lambda number, kind: errno.ENOSPC if kind == "allocate" else 0
        with capture_logs() as logs:
            for _ in range(3):
                with pytest.raises(SendError, match="no room on the disk"):
                    broker.sends.send(Message("orders", b"x"))
        down = checks.read()
        refusing = broker.metrics.snapshot()["store.refusing"]
        disk.judge = never
        broker.sends.send(Message("orders", b"x"))
        up, accepting = checks.read(), broker.metrics.snapshot()["store.refusing"]

    assert [line["event"] for line in logs] == ["store.messages_refused"]
    assert logs[0]["log_level"] == "error"
    for name in ("flush", "diskSpace"):
        assert down.components[name].status is Status.DOWN
        assert "no room on the disk" in str(down.components[name].details["error"])
        assert "free space there" in str(down.components[name].details["error"])
    assert (refusing, accepting) == (1, 0)
    assert up.status is Status.UP


@pytest.mark.feature("14.3")
def test_a_lag_beyond_the_threshold_is_down(observe: Observe) -> None:
    observed = observe(bill, management__health__max_lag=5)
    [container] = observed.app.containers
    container.pause()
    statuses = []
    for _ in range(6):
        observed.app.template.sync_send("orders", "x")
        statuses.append(observed.app.get(HealthChecks).read().components["lag"].status)
    container.resume()
    observed.harness.advance("1s")

    assert statuses == [Status.UP] * 5 + [Status.DOWN]
    assert observed.app.get(HealthChecks).read().components["lag"].details == {"groups": {"billing": 0}, "allowed": 5}


@pytest.mark.feature("14.3")
def test_a_late_delivery_is_down_for_a_minute_or_two(observe: Observe) -> None:
    observed = observe(bill, management__health__max_lateness_ms="20s")
    [container] = observed.app.containers
    observed.app.template.sync_send("orders", "x", delay="1s")
    container.pause()
    observed.harness.advance("31s")
    container.resume()
    observed.harness.advance("1s")
    checks = observed.app.get(HealthChecks)
    late = checks.read().components["lateness"]
    observed.harness.advance("3m")

    assert (late.status, late.details["worstMs"]) == (Status.DOWN, 30_000)
    assert checks.read().status is Status.UP


def test_a_paused_listener_is_up_and_a_stopped_one_down(observe: Observe) -> None:
    observed = observe(bill)
    [container] = observed.app.containers
    checks = observed.app.get(HealthChecks)
    container.pause()
    paused = checks.read().components["listeners"]
    container.stop()

    assert (paused.status, list(paused.details.values())) == (Status.UP, ["paused"])
    assert checks.read().components["listeners"].status is Status.DOWN


@pytest.mark.feature("14.3")
def test_a_hanging_handler_is_down_until_it_returns() -> None:
    started, release = threading.Event(), threading.Event()

    @message_listener(topic="orders", consumer_group="billing")
    def hangs(order: str) -> None:
        if order == "slow":
            started.set()
            release.wait(60)

    settings = {"mqtemplate.management.enabled": True, "rocketmq.name-server": "embedded:memory"}
    with MQApplication(hangs, settings=settings) as app:
        checks = app.get(HealthChecks)
        app.template.sync_send("orders", "slow")
        assert started.wait(60)
        watchdog = app.containers[0].member.service._watchdog
        watchdog._timeout_ms = -1  # a quarter of an hour has passed
        app.template.sync_send("orders", "next")
        hanging = eventually(
            lambda: (found := checks.read().components["handlers"]).status is Status.DOWN and found, "a hanging handler"
        )
        watchdog._timeout_ms = 900_000
        release.set()
        eventually(lambda: checks.read().components["handlers"].status is Status.UP, "the handler has returned")

    assert hanging
    assert list(hanging.details["hanging"].values()) == [1]  # type: ignore[attr-defined]


@pytest.mark.feature("14.3")
def test_a_server_that_does_not_answer_is_down(free_server: tuple[RemoteBroker, threading.Event]) -> None:
    broker, stop = free_server
    checks = HealthChecks(broker_checks(broker, HealthSettings()), 10_000)
    before = checks.read().components["broker"]
    stop.set()
    after = eventually(
        lambda: (found := checks.read().components["broker"]).status is Status.DOWN and found, "the broker is down"
    )
    checks.close()

    assert (before.status, before.details["brokers"]) == (Status.UP, ["broker-a"])
    assert after


def test_a_check_that_raises_or_hangs_is_down_and_does_not_stop_the_others() -> None:
    release = threading.Event()

    def fails() -> ComponentHealth:
        raise OSError("refused")

    def hangs() -> ComponentHealth:
        release.wait(60)
        return ComponentHealth(Status.UP)

    checks = HealthChecks({"fails": fails, "hangs": hangs, "good": lambda: ComponentHealth(Status.UP)}, 50)
    first, second = checks.read(), checks.read()
    release.set()
    eventually(lambda: checks.read().components["hangs"].status is Status.UP, "the check answers again")
    checks.close()

    assert first.components["fails"].details["error"] == "OSError: refused"
    assert first.components["hangs"].details["error"] == "no answer in 0.05 s"
    assert second.components["hangs"].status is Status.DOWN
    assert first.components["good"].status is Status.UP


def test_the_time_is_for_all_checks_together() -> None:
    release = threading.Event()

    def hangs() -> ComponentHealth:
        release.wait(60)
        return ComponentHealth(Status.UP)

    checks = HealthChecks({f"component-{number}": hangs for number in range(5)}, 200)
    start = time.monotonic()
    health = checks.read()
    took_s = time.monotonic() - start
    release.set()
    checks.close()

    assert len(health.components) == 5
    assert 0.2 <= took_s < 0.8


def test_an_application_adds_components_of_its_own(observe: Observe) -> None:
    observed = observe()
    checks = observed.app.get(HealthChecks)
    checks.add("database", lambda: ComponentHealth(Status.UNKNOWN, {"reason": "not connected yet"}))

    assert checks.read().status is Status.UNKNOWN


@pytest.mark.feature("14.3")
def test_the_broker_of_a_further_template_and_the_lag_there_are_checked() -> None:
    """The listener reads from another broker, which does not have the topics of the application's own."""

    @message_listener(topic="entries", consumer_group="auditors", broker="audit")
    def note(entry: str) -> None: ...

    settings = {
        "rocketmq.name-server": "embedded:memory",
        "rocketmq.templates.audit.name-server": "embedded:memory",
        "mqtemplate.management.enabled": True,
    }
    with MQApplication(note, settings=settings, environment={}, clock=VirtualClock()) as app:
        app.containers[0].pause()
        for entry in ("login", "logout"):
            app.get(RocketMQTemplate, "audit").sync_send("entries", entry)
        app.template.sync_send("entries", "elsewhere")
        health = app.get(HealthChecks).read()
        lags = [each for each in app.get(Observability).metrics.samples() if each.name == "group.lag"]
        app.brokers["audit"].close()
        broken = app.get(HealthChecks).read()

    assert {"broker", "flush", "broker.audit", "flush.audit"} <= set(health.components)
    assert health.components["lag"].details["groups"] == {"auditors": 2}
    assert {each.labels["listener"] for each in lags} == {app.containers[0].endpoint.id}
    assert (health.status, broken.components["broker.audit"].status) == (Status.UP, Status.DOWN)


def test_health_names_the_groups_that_keep_old_files(tmp_path: Path) -> None:
    """It stays up: a restart would not help, and neither would fewer requests."""
    clock = VirtualClock()
    settings = EmbeddedSettings(mapped_file_size_commit_log=65_536, default_topic_queue_nums=1)
    with EmbeddedBroker(tmp_path, settings, clock) as broker:
        checks = HealthChecks(broker_checks(broker, HealthSettings()), is_virtual=True)
        for _ in range(4):
            broker.sends.send(Message("orders", bytes(20_000)))
        broker.groups.commit_offset("billing", MessageQueue("orders", "broker-a", 0), 1)
        young = checks.read().components["retention"]
        since = clock.now_ms() + 72 * 3_600_000
        Harness(broker).advance("5d")
        old = checks.read().components["retention"]

    assert (young.status, young.details) == (Status.UP, {})
    assert old.status is Status.UP
    assert old.details["heldBackBy"] == [
        {"group": "billing", "topic": "orders", "messages": 2, "bytes": 65_536, "since": time_text(since)}
    ]
