"""The continuous copy: places that fail, two owners, gaps, retention, lag and health."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.copy import CopiedBroker
from mqtemplate.copy import copier as copier_module
from mqtemplate.copy.catalogue import Catalogue, Epoch, to_json
from mqtemplate.copy.objects import FolderObjects, ObjectStore
from mqtemplate.copy.restore import list_copy, restore_store, verify_copy
from mqtemplate.engine.settings import CopyOptions
from mqtemplate.errors import ConfigurationError, CopyError
from mqtemplate.message import Message
from mqtemplate.observability.health import HealthChecks, Status, broker_checks
from mqtemplate.observability.settings import HealthSettings
from mqtemplate.testing import Harness
from tests.copy.recorded import opened_state, small_settings, state_of

DAY_MS = 86_400_000


class FailingObjects(ObjectStore):
    """A folder that can be made to fail, and counts the writes."""

    def __init__(self, url: str) -> None:
        self._inner = FolderObjects(url)
        self.url = url
        self.is_down = False
        self.put_count = 0
        self.fails_after: int | None = None

    def _check(self) -> None:
        if self.is_down or (self.fails_after is not None and self.put_count >= self.fails_after):
            raise CopyError(f"{self.url}: no route to host")

    def put(self, name: str, data: bytes) -> None:
        self._check()
        self.put_count += 1
        self._inner.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._check()
        return self._inner.create(name, data)

    def get(self, name: str) -> bytes:
        self._check()
        return self._inner.get(name)

    def list(self, prefix: str) -> dict[str, int]:
        self._check()
        return self._inner.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        self._check()
        self._inner.delete(names)


class Shop:
    """A copied broker on a virtual clock, with its place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock | None = None) -> None:
        self.folder = folder
        self.clock = clock or VirtualClock()
        self.url = f"file://{folder / 'copy'}"
        self.objects = FailingObjects(self.url)
        monkeypatch.setattr(copier_module, "open_objects", lambda url, options: self.objects)

    def broker(self, store: str = "store", **options: object) -> CopiedBroker:
        place = CopyOptions(to=self.url, **options)  # type: ignore[arg-type]
        return CopiedBroker(self.folder / store, small_settings(), self.clock, copy=place)

    def catalogue(self) -> Catalogue:
        return Catalogue.read(FolderObjects(self.url))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path, monkeypatch)


def copy_metrics(broker: EmbeddedBroker) -> dict[str, float]:
    """Return the metrics of the copy by their names without the prefix."""
    found = broker.metrics.snapshot()
    return {name.removeprefix("copy."): value for name, value in found.items() if name.startswith("copy.")}  # type: ignore[misc]


def send(broker: EmbeddedBroker, *bodies: str) -> None:
    for body in bodies:
        broker.sends.send(Message("orders", body.encode()))


# --- places that fail ---------------------------------------------------------------------------


def test_a_place_that_is_gone_delays_no_send_and_is_logged_once(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """An hour without the place: all messages are stored, the lag grows, and one line says so; then all is copied."""
    caplog.set_level(logging.INFO, "mqtemplate.copy")
    with shop.broker() as broker:
        harness = Harness(broker)
        harness.advance("2s")
        shop.objects.is_down = True
        send(broker, "one", "two")
        harness.advance("1h")
        health = broker.copy_health()

        assert health.lag_bytes > 0
        assert 3_599_000 <= health.lag_ms <= 3_602_000
        assert health.error == f"{shop.url}: no route to host"
        assert len([each for each in caplog.records if "copy.failed" in each.msg]) == 1
        tries = next(each for each in broker.metrics.samples() if each.name == "copy.failures").value
        assert 60 <= tries <= 70  # type: ignore[operator]  # 1, 2, 4, … 60 s: once a minute

        shop.objects.is_down = False
        harness.advance("61s")
        assert (broker.copy_health().lag_bytes, broker.copy_health().lag_ms, broker.copy_health().error) == (0, 0, None)
        assert any("copy.works_again" in each.msg for each in caplog.records)


def test_an_idle_store_writes_only_signs_of_life(shop: Shop) -> None:
    with shop.broker() as broker:
        harness = Harness(broker)
        harness.advance("30s")
        before = shop.objects.put_count
        harness.advance("100s")

        assert shop.objects.put_count - before == 5
        assert broker.copy_health().copied_ms == pytest.approx(shop.clock.now_ms(), abs=1_000)


def test_health_is_down_above_the_allowed_lag(shop: Shop) -> None:
    with shop.broker(max_lag=60_000) as broker:
        harness = Harness(broker)
        harness.advance("2s")
        checks = HealthChecks(broker_checks(broker, HealthSettings()), is_virtual=True)
        assert checks.read().components["copy"].status is Status.UP

        shop.objects.is_down = True
        send(broker, "one")
        harness.advance("2m")

        found = checks.read().components["copy"]
        assert found.status is Status.DOWN
        assert found.details["error"] == f"{shop.url}: no route to host"


def test_the_metrics_show_a_place_that_fails_and_a_snapshot_that_is_overdue(shop: Shop) -> None:
    """The snapshot of each hour is written in time, then it waits for the place."""
    with shop.broker(snapshot_interval=3_600_000, max_lag=60_000) as broker:
        harness = Harness(broker)
        assert "snapshot_age_ms" not in copy_metrics(broker), "there is no snapshot before the first step"
        harness.advance("10m")
        before = copy_metrics(broker)

        shop.objects.is_down = True
        send(broker, "one")
        harness.advance("2h")
        meanwhile = copy_metrics(broker)
        shop.objects.is_down = False
        harness.advance("2m")
        after = copy_metrics(broker)

    assert (before["failing"], before["refused"], before["fenced"], before["gaps"]) == (0, 0, 0, 0)
    assert before["lag_ms"] == before["snapshot_overdue_ms"] == 0
    assert before["max_lag_ms"] == 60_000
    assert before["snapshot_age_ms"] == pytest.approx(600_000, abs=2_000)
    assert (meanwhile["failing"], meanwhile["refused"]) == (1, 0)
    assert meanwhile["lag_ms"] == pytest.approx(7_200_000, abs=2_000)
    assert meanwhile["snapshot_age_ms"] == pytest.approx(7_800_000, abs=2_000)
    assert meanwhile["snapshot_overdue_ms"] == pytest.approx(4_200_000, abs=2_000)
    assert (after["failing"], after["lag_ms"], after["snapshot_overdue_ms"]) == (0, 0, 0)
    assert after["snapshot_age_ms"] < 120_000


def test_segments_of_a_minute_become_one(shop: Shop, tmp_path: Path) -> None:
    """A restore reads an object for each minute, and has each moment in it."""
    with shop.broker() as broker:
        harness = Harness(broker)
        moment_ms = shop.clock.now_ms() + 74_999  # the millisecond before the next message
        for number in range(150):
            send(broker, f"message-{number}")
            harness.advance("1s")

        assert len(shop.objects.list("segments/")) < 40
    restore_store(shop.url, tmp_path / "restored", moment_ms, settings=small_settings(), clock=shop.clock)
    found = opened_state(tmp_path / "restored", moment_ms)
    assert found.delivered == [f"message-{number}" for number in range(75)]
    assert verify_copy(shop.url).problems == ()


def test_a_restore_goes_on_when_segments_become_one_meanwhile(shop: Shop, tmp_path: Path) -> None:
    """The names were read before the original merged the segments that they name."""
    with shop.broker() as broker:
        harness = Harness(broker)
        for number in range(59):
            send(broker, f"message-{number}")
            harness.advance("1s")
        is_merged = False

        def merge(count: int) -> None:
            nonlocal is_merged
            if not is_merged:
                is_merged = True
                send(broker, "the last")
                harness.advance("5s")

        report = restore_store(
            shop.url, tmp_path / "fork", fork=True, settings=small_settings(), on_progress=merge, clock=shop.clock
        )

    assert is_merged
    assert report.store.message_count >= 59


def test_a_copy_in_the_directory_itself_is_refused(tmp_path: Path) -> None:
    inside = CopyOptions(to=f"file://{tmp_path}/store/copy")
    with pytest.raises(ConfigurationError, match="in the store directory itself: it would be lost with it"):
        CopiedBroker(tmp_path / "store", None, None, copy=inside)


# --- one history --------------------------------------------------------------------------------


def test_a_killed_owner_continues_its_copy(shop: Shop, tmp_path: Path) -> None:
    """After a kill the next process begins an epoch where the copy ends, and nothing is copied twice."""
    broker = shop.broker()
    broker.start()
    send(broker, "one")
    Harness(broker).advance("2s")
    broker.store.release()  # as a killed process: nothing is flushed or marked as closed

    with shop.broker() as broker:
        send(broker, "two")
        Harness(broker).advance("2s")
        expected = state_of(broker)

    catalogue = shop.catalogue()
    logs = [(each.start, each.end) for each in catalogue.segments if each.end > each.start]
    assert [each.number for each in catalogue.epochs] == [1, 2]
    assert all(one[1] <= other[0] for one, other in pairwise(logs))
    restore_store(shop.url, tmp_path / "restored", settings=small_settings(), clock=shop.clock)
    assert opened_state(tmp_path / "restored", shop.clock.now_ms()) == expected


def test_a_directory_restored_to_an_earlier_moment_has_a_history_of_both(shop: Shop, tmp_path: Path) -> None:
    """The moments before and after the restore can both be restored."""
    with shop.broker() as broker:
        harness = Harness(broker)
        send(broker, "one")
        harness.advance("5s")
        first_ms = shop.clock.now_ms()
        send(broker, "two")
        harness.advance("5s")
        second_ms = shop.clock.now_ms()
    restore_store(shop.url, tmp_path / "again", first_ms - 1, settings=small_settings(), clock=shop.clock)
    with shop.broker("again") as broker:
        send(broker, "three")
        Harness(broker).advance("5s")

    def delivered(name: str, until_ms: int | None) -> list[str]:
        restore_store(shop.url, tmp_path / name, until_ms, settings=small_settings(), clock=shop.clock)
        return opened_state(tmp_path / name, shop.clock.now_ms()).delivered

    assert delivered("old", second_ms - 1) == ["one", "two"]
    assert delivered("new", None) == ["one", "three"]


def test_another_directory_does_not_write_into_a_copy(shop: Shop) -> None:
    with shop.broker() as broker:
        send(broker, "one")
        Harness(broker).advance("2s")
    with shop.broker("other") as broker:
        send(broker, "two")
        Harness(broker).advance("2s")
        health = broker.copy_health()

    assert health.is_refused
    assert health.error is not None
    assert "has the copy of another store directory" in health.error
    assert "give mqtemplate.copy.to a place of its own" in health.error
    assert len(shop.catalogue().epochs) == 1


def test_an_owner_stops_when_another_has_taken_over(shop: Shop) -> None:
    """A newer epoch exists: what the older process would write counts for nothing, so it stops and says so."""
    with shop.broker() as broker:
        harness = Harness(broker)
        send(broker, "one")
        harness.advance("2s")
        first = shop.catalogue().epochs[0]
        newer = replace(first, number=2, start=0, host="machine-b", time_ms=first.time_ms + 1)
        assert shop.objects.create(newer.object, to_json(newer))

        harness.advance("21s")
        health, metrics = broker.copy_health(), copy_metrics(broker)

    assert health.is_refused
    assert (metrics["refused"], metrics["failing"]) == (1, 0), "it is not tried again"
    assert health.error is not None
    assert "on machine-b has taken over the copy" in health.error
    assert "two brokers have one history now: stop one of them" in health.error


def test_an_owner_elsewhere_is_waited_for_while_it_is_alive(shop: Shop) -> None:
    """The process before was on another machine, and has not said that it ended."""
    with shop.broker() as broker:
        Harness(broker).advance("2s")
    previous = shop.catalogue().epochs[0]
    elsewhere = Epoch(2, 0, shop.clock.now_ms(), previous.file_size, "machine-b", 4711, "/srv/data")
    shop.objects.create(elsewhere.object, to_json(elsewhere))

    with shop.broker() as broker:
        harness = Harness(broker)
        harness.advance("20s")
        error = broker.copy_health().error
        assert error is not None
        assert "process 4711 on machine-b copies /srv/data" in error

        harness.advance("2m")
        assert broker.copy_health().error is None
    assert [each.number for each in shop.catalogue().epochs] == [1, 2, 3]


def test_a_moment_counts_once_everything_until_then_is_copied(shop: Shop, tmp_path: Path) -> None:
    """The copy stops between two parts of one second: the moment before is the last one, and the part does no harm."""
    with shop.broker() as broker:
        harness = Harness(broker)
        send(broker, "one")
        harness.advance("2s")
        last_ms = list_copy(shop.url, clock=shop.clock).last_ms
        send(broker, *(f"{number}-{'x' * 800}" for number in range(30)))  # more than one file of the log
        shop.objects.fails_after = shop.objects.put_count + 1
        harness.advance("2s")

        assert list_copy(shop.url, clock=shop.clock).last_ms == last_ms
        with pytest.raises(CopyError, match="has no such moment: the copy ends at"):
            restore_store(shop.url, tmp_path / "late", shop.clock.now_ms(), fork=True, clock=shop.clock)
        restore_store(shop.url, tmp_path / "last", fork=True, settings=small_settings(), clock=shop.clock)
    assert opened_state(tmp_path / "last", shop.clock.now_ms()).delivered[0] == "one"


# --- retention ----------------------------------------------------------------------------------


def test_a_file_that_is_not_copied_stays(shop: Shop) -> None:
    """With keep-uncopied a commit log file stays beyond its age; the reason names the place and the setting."""
    with shop.broker(interval=600_000) as broker:
        harness = Harness(broker)
        harness.advance("2s")
        shop.objects.is_down = True
        send(broker, *(f"{number}-{'x' * 800}" for number in range(60)))
        why = broker.store.cleaning.holds[0](16_384)
        assert why is not None
        assert "it is not copied to file://" in why
        assert "set mqtemplate.copy.keep-uncopied to false" in why
        harness.advance("96h")
        assert broker.store.start_offset == 0

        shop.objects.is_down = False
        harness.advance("48h")
        assert broker.store.start_offset > 0
        assert broker.copy_health().lag_bytes == 0


def test_deleted_files_that_were_not_copied_are_a_gap(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Without keep-uncopied the copy says how many bytes it misses, goes on, and is whole again."""
    with shop.broker(keep_uncopied=False) as broker:
        harness = Harness(broker)
        send(broker, "first")
        harness.advance("2s")
        shop.objects.is_down = True
        send(broker, *(f"{number}-{'x' * 800}" for number in range(60)))
        harness.advance("96h")
        assert broker.store.start_offset > 0
        shop.objects.is_down = False
        harness.advance("2m")
        expected = state_of(broker)
        assert copy_metrics(broker)["gaps"] == 1

    assert any("copy.gap" in each.msg and "missing_bytes" in each.msg for each in caplog.records)
    assert verify_copy(shop.url).problems == ()
    restore_store(shop.url, shop.folder / "restored", settings=small_settings(), clock=shop.clock)
    assert opened_state(shop.folder / "restored", shop.clock.now_ms()) == expected


def test_old_objects_are_deleted_and_each_moment_that_is_kept_can_be_restored(shop: Shop, tmp_path: Path) -> None:
    moments: list[tuple[int, list[str]]] = []
    with shop.broker(interval=3_600_000, snapshot_interval=DAY_MS, keep=2 * DAY_MS) as broker:
        harness = Harness(broker)
        for day in range(8):
            send(broker, *(f"day-{day}-{'x' * 800}-{number}" for number in range(15)))
            harness.advance("23h")
            moments.append((shop.clock.now_ms(), state_of(broker).delivered))
            harness.advance("1h")

    assert len(shop.catalogue().snapshots) <= 4
    assert (list_copy(shop.url, clock=shop.clock).first_ms or 0) > moments[2][0]
    for moment, delivered in moments[-2:]:
        restore_store(shop.url, tmp_path / f"{moment}", moment, settings=small_settings(), clock=shop.clock)
        found = opened_state(tmp_path / f"{moment}", moment).delivered
        assert found[-len(delivered) :] == delivered
    with pytest.raises(CopyError, match="has no such moment: the copy begins"):
        restore_store(shop.url, tmp_path / "early", moments[0][0], settings=small_settings(), clock=shop.clock)


def test_the_last_bytes_are_copied_when_the_broker_closes(shop: Shop) -> None:
    with shop.broker() as broker:
        send(broker, "the last one")

    alive = json.loads(shop.objects.get("alive/00000001.json"))
    assert alive["is_closed"] is True
    assert max(each.end for each in shop.catalogue().segments) == broker.store.end_offset
