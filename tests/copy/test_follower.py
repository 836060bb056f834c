"""A follower: a store directory that is kept current from a copy, and takes over; the lease of its owner."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.converters.readable import time_text
from mqtemplate.copy import follower as follower_module
from mqtemplate.copy.follower import Follower, FollowLoop, request_promotion
from mqtemplate.copy.objects import FolderObjects
from mqtemplate.copy.restore import restore_store
from mqtemplate.errors import CopyError, SendError, StoreError, StoreLockedError
from mqtemplate.message import Message
from mqtemplate.observability.health import broker_checks
from mqtemplate.observability.settings import HealthSettings
from mqtemplate.store.files.store_files import ABORT_FILE
from mqtemplate.testing import Harness
from tests.copy.recorded import RecordedRun, opened_state, small_settings, state_of
from tests.copy.test_copier import Shop, copy_metrics, send

LEASE_MS = 9_000


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path, monkeypatch)


def follower(shop: Shop, name: str = "standby") -> Follower:
    return Follower(shop.url, shop.folder / name, settings=small_settings(), clock=shop.clock)


@contextmanager
def on_another_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "another")
        yield


# --- following ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_follower_that_takes_over_has_the_state_of_its_owner(shop: Shop, seed: int) -> None:
    """Whenever it has looked at the copy, and built its files, or was started again."""
    chance = random.Random(seed)
    with shop.broker(interval=10) as broker, follower(shop) as standby:
        run = RecordedRun(broker, shop.clock, seed)
        following = [standby]

        def look() -> None:
            if chance.random() < 0.3:
                following[0].catch_up()
            if chance.random() < 0.1 and following[0].state is not None:
                following[0].warm()
            if chance.random() < 0.1:
                following[0].__exit__()
                following[0] = follower(shop)

        run.run(30, look)
        state = state_of(broker)
    promotion = following[0].promote()

    assert opened_state(shop.folder / "standby", shop.clock.now_ms()) == state
    assert promotion.store.pending_count == len(state.pending)


def test_no_broker_owns_a_directory_that_follows_a_copy(shop: Shop) -> None:
    with shop.broker() as broker, follower(shop) as standby:
        Harness(broker).advance("2s")
        standby.catch_up()
        with pytest.raises(
            StoreLockedError,
            match=r"standby follows the copy of another one, which may be in use; to use it, let it take over with: "
            r"mqtemplate promote .*standby$",
        ):
            EmbeddedBroker(shop.folder / "standby", small_settings(), shop.clock).start()
        with pytest.raises(StoreLockedError, match="standby"):
            follower(shop)


def test_a_follower_that_was_killed_while_it_built_its_files_builds_them_again(shop: Shop) -> None:
    with shop.broker() as broker:
        send(broker, "one", "two")
        Harness(broker).advance("2s")
        with follower(shop) as standby:
            standby.catch_up()
            standby.warm()
        (shop.folder / "standby" / ABORT_FILE).write_bytes(b"1 -")
        (shop.folder / "standby" / "checkpoint").write_bytes(b"half")
        send(broker, "three")
        state = state_of(broker)
    with follower(shop) as standby:
        standby.promote()
    assert opened_state(shop.folder / "standby", shop.clock.now_ms()) == state


def test_a_follower_goes_on_after_a_restart_of_its_owner_and_begins_again_after_a_restore(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    with follower(shop) as standby:
        with shop.broker() as broker:
            send(broker, "one")
            Harness(broker).advance("2s")
            early_ms = shop.clock.now_ms()
            Harness(broker).advance("1s")
            send(broker, "two")
        standby.catch_up()
        with shop.broker() as broker:
            send(broker, "three")
            Harness(broker).advance("2s")
        standby.catch_up()
        assert not [each for each in caplog.records if "begins_again" in each.msg]

        restore_store(shop.url, shop.folder / "restored", early_ms, settings=small_settings(), clock=shop.clock)
        with shop.broker("restored") as broker:
            Harness(broker).advance("90s")
            send(broker, "four")
            state = state_of(broker)
        standby.catch_up()
        assert [each for each in caplog.records if "begins_again" in each.msg]
        standby.promote()
    assert state.delivered == ["one", "four"]
    assert opened_state(shop.folder / "standby", shop.clock.now_ms()) == state


def test_a_follower_deletes_the_files_that_its_owner_has_deleted(shop: Shop) -> None:
    with shop.broker(interval=3_600_000, snapshot_interval=7_200_000) as broker, follower(shop) as standby:
        harness = Harness(broker)
        for number in range(100):
            send(broker, f"{number}" + "x" * 1_000)
        harness.advance("2h")
        standby.catch_up()
        count = len(list((shop.folder / "standby" / "commitlog").iterdir()))
        harness.advance("80h")
        standby.catch_up()
        assert len(list((shop.folder / "standby" / "commitlog").iterdir())) < count
        state = state_of(broker)
    with follower(shop) as standby:
        standby.promote()
    assert opened_state(shop.folder / "standby", shop.clock.now_ms()) == state


def test_a_follower_refuses_another_folder_and_another_copy(shop: Shop) -> None:
    (shop.folder / "full").mkdir()
    (shop.folder / "full" / "file").touch()
    with pytest.raises(StoreError, match="full is not empty, and follows no copy; give a folder that does not exist"):
        follower(shop, "full")
    with pytest.raises(StoreError, match=r"new follows no copy; name the copy: mqtemplate broker --follow SOURCE"):
        Follower(None, shop.folder / "new")
    with shop.broker() as broker, follower(shop) as standby:
        Harness(broker).advance("2s")
        standby.catch_up()
    with pytest.raises(CopyError, match=r"standby follows file:///.*/copy, not file:///elsewhere; give it that one"):
        Follower("file:///elsewhere", shop.folder / "standby")


# --- the lease --------------------------------------------------------------------------------------


def test_an_owner_with_a_lease_accepts_nothing_while_its_copy_takes_no_sign_of_life(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mqtemplate.copy")
    with shop.broker(lease=LEASE_MS) as broker:
        harness = Harness(broker)
        broker.sends.send(Message("orders", b"later", {"TIMER_DELAY_MS": "10000"}))
        shop.objects.is_down = True
        harness.advance("5s")
        send(broker, "still")
        harness.advance("20s")
        with pytest.raises(
            SendError,
            match=r"copy has taken no sign of life of this broker for 9s \(mqtemplate.copy.lease\), so a follower may "
            "have taken over; nothing is accepted or released until it takes one again",
        ):
            send(broker, "refused")
        assert copy_metrics(broker)["fenced"] == 1
        assert state_of(broker).delivered == ["still"]

        shop.objects.is_down = False
        harness.advance("5s")
        assert copy_metrics(broker)["fenced"] == 0
        send(broker, "again")
        assert state_of(broker).delivered == ["still", "later", "again"]
    logged = [each.msg.split()[0] for each in caplog.records]
    assert [each for each in logged if each.startswith("copy.lease")] == ["copy.lease_is_over", "copy.lease_renewed"]


def test_a_follower_waits_for_the_end_of_the_lease_and_the_owner_never_stores_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has lost its copy and its clients have not lost the owner: the case of two owners."""
    with shop.broker(lease=LEASE_MS) as broker:
        harness = Harness(broker)
        send(broker, "one")
        harness.advance("2s")
        with on_another_host(monkeypatch), follower(shop) as standby:
            standby.catch_up()
            with pytest.raises(
                CopyError, match="the owner is alive: process .* has just copied .*; stop it, then promote"
            ):
                standby.promote()
            shop.objects.is_down = True
            waits: list[int] = []
            standby.promote(on_wait=waits.append)
        assert LEASE_MS < waits[0] <= 2 * LEASE_MS
        with pytest.raises(SendError):
            send(broker, "refused")
        shop.objects.is_down = False
        harness.advance("60s")
        with pytest.raises(SendError, match="process .* on another has taken over the copy"):
            send(broker, "refused too")
    assert opened_state(shop.folder / "standby", shop.clock.now_ms()).delivered == ["one"]


@pytest.mark.parametrize("seed", range(12))
def test_an_owner_and_its_follower_never_both_store(shop: Shop, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever the copy takes from either, and when: from the promotion on each send to the owner is refused."""
    chance = random.Random(seed)
    with shop.broker(lease=LEASE_MS) as broker:
        harness = Harness(broker)
        harness.advance("2s")
        with on_another_host(monkeypatch), follower(shop) as standby:
            promoted = False
            while not promoted:
                harness.advance(f"{chance.randrange(1, 8_000)}ms")
                shop.objects.is_down = chance.random() < 0.5
                if chance.random() < 0.3:
                    try:
                        standby.promote()
                        promoted = True
                    except CopyError:
                        continue
        for _ in range(10):
            with pytest.raises(SendError):
                send(broker, "refused")
            shop.objects.is_down = chance.random() < 0.5
            harness.advance(f"{chance.randrange(1, 30_000)}ms")


def test_a_directory_that_is_not_the_newest_any_more_accepts_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop.broker(lease=LEASE_MS) as broker:
        send(broker, "one")
        Harness(broker).advance("2s")
    with on_another_host(monkeypatch), follower(shop) as standby:
        standby.promote()
        with shop.broker("standby", lease=LEASE_MS) as broker:
            send(broker, "two")
            Harness(broker).advance("2s")
            with monkeypatch.context() as patch:
                patch.setattr(socket, "gethostname", lambda: "first")
                with pytest.raises(
                    CopyError, match="process .* on another copies .*standby to file.*, and was alive at"
                ):
                    shop.broker(lease=LEASE_MS).start()
    with (
        shop.broker(lease=LEASE_MS) as broker,
        pytest.raises(
            SendError,
            match="on another has gone on with the history of this store directory, in .*standby, .*; this directory "
            "is not the newest any more. Move it away, and write a new one with: mqtemplate broker --follow",
        ),
    ):
        send(broker, "three")


def test_without_a_lease_the_owner_must_have_been_silent_or_the_operator_forces(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = shop.broker()
    broker.start()
    send(broker, "one")
    Harness(broker).advance("2s")
    with on_another_host(monkeypatch), follower(shop) as standby:
        with pytest.raises(CopyError, match="the owner is alive"):
            standby.promote()
        standby.promote(force=True)
    assert opened_state(shop.folder / "standby", shop.clock.now_ms()).delivered == ["one"]
    broker.close()


def test_an_owner_of_this_machine_must_have_ended(shop: Shop) -> None:
    with shop.broker() as broker, follower(shop) as standby:
        Harness(broker).advance("2s")
        with pytest.raises(StoreLockedError, match="the original .*store is in use by process .*Stop that one first"):
            standby.promote(force=True)


# --- what operators see -----------------------------------------------------------------------------


def test_the_owner_knows_its_followers_their_state_and_the_last_snapshot(shop: Shop) -> None:
    """A follower writes a sign of life, and the owner reads it with its own. It is gone with the follower."""
    with shop.broker() as broker:
        harness = Harness(broker)
        send(broker, "one")
        harness.advance("2s")
        began_ms = shop.clock.now_ms()
        with follower(shop) as standby:
            standby.catch_up()
            harness.advance("21s")

            health = broker.copy_health()
            assert (health.epoch, health.lease_ms) == (1, None)
            assert health.owner == f"process {os.getpid()} on {socket.gethostname()}, {broker.path}"
            assert health.snapshot_ms is not None
            assert health.snapshot_ms <= began_ms
            (found,) = health.followers
            assert (found.host, found.pid) == (socket.gethostname(), os.getpid())
            assert (found.folder, found.seen_ms) == (str(standby.path), began_ms)
            assert standby.state is not None
            assert found.copied_ms == standby.state.moment_ms
            details = broker_checks(broker, HealthSettings())["copy"]().details
            assert details["epoch"] == 1
            assert details["lastSnapshot"] == time_text(health.snapshot_ms)
            assert [each["process"] for each in details["followers"]] == [
                f"process {found.pid} on {found.host}, {found.folder}"
            ]
        harness.advance("21s")
        assert broker.copy_health().followers == ()


def test_a_sign_of_a_follower_is_forgotten_after_a_day(shop: Shop) -> None:
    """A follower whose machine is gone deletes nothing: operators see when it was there last."""
    with shop.broker(interval=60_000) as broker:
        harness = Harness(broker)
        harness.advance("2m")
        standby = follower(shop)
        standby.catch_up()  # killed after that
        assert "follower_silent_ms" not in copy_metrics(broker), "the owner has not read it yet"
        harness.advance("1h")
        assert len(broker.copy_health().followers) == 1
        assert copy_metrics(broker)["follower_silent_ms"] == 3_600_000

        harness.advance("24h")

        assert broker.copy_health().followers == ()
        assert "follower_silent_ms" not in copy_metrics(broker)
        assert shop.objects.list("followers/") == {}


class ReadOnlyObjects(FolderObjects):
    """A place with an account that may only read."""

    def put(self, name: str, data: bytes) -> None:
        raise CopyError(f"{self.url}: {name}: access denied")


def test_a_follower_that_may_not_write_follows_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower_module, "open_objects", lambda url, options: ReadOnlyObjects(url))
    with shop.broker() as broker, follower(shop) as standby:
        harness = Harness(broker)
        send(broker, "one")
        harness.advance("2s")

        standby.catch_up()
        assert "access denied" in caplog.text
        caplog.clear()
        send(broker, "two")
        harness.advance("30s")
        send(broker, "three")
        harness.advance("2s")
        with caplog.at_level(logging.WARNING):
            assert standby.catch_up() > 0

        assert "copy.follower_unseen" not in caplog.text  # the first one was logged, and no other
    assert opened_state(shop.folder / "store", shop.clock.now_ms()).delivered == ["one", "two", "three"]


def test_what_is_no_sign_of_a_follower_is_left_out(shop: Shop) -> None:
    with shop.broker() as broker:
        harness = Harness(broker)
        harness.advance("2s")
        for number, text in enumerate((b"{", b"[]", b"{}", b'{"host": "a", "pid": "x"}')):
            shop.objects.put(f"followers/{number}.json", text)

        harness.advance("21s")

        health = broker.copy_health()
        assert (health.error, health.followers) == (None, ())


# --- the process that follows -----------------------------------------------------------------------


def test_a_running_follower_says_what_it_does_and_answers_requests(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with follower(shop) as standby:
        loop = FollowLoop(standby, 1_000, said.append)
        assert loop.run(lambda seconds: True) is None
        assert said == [
            f"waiting: {shop.url} has no copy (copy.json is missing); give the place that mqtemplate.copy.to names"
        ]
        with shop.broker() as broker:
            harness = Harness(broker)
            send(broker, "one")
            harness.advance("2s")
            looks = iter([False, True])
            loop.run(lambda seconds: next(looks))
            assert said[1].startswith("current until 20")
            monkeypatch.setattr(shop.clock, "sleep", lambda seconds: loop.run(lambda seconds: True), raising=True)
            with pytest.raises(CopyError, match="is in use by process"):
                request_promotion(standby.path, force=False, clock=shop.clock)
        request_promotion(standby.path, force=False, clock=shop.clock)
    assert opened_state(standby.path, shop.clock.now_ms()).delivered == ["one"]
