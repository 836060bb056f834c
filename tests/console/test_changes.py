"""Changes by the dashboard: pending messages, dead letters, listeners, and their audit log."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Access, AuditLog, Dashboard, FolderSource, OpenSource
from mqtemplate.console.jobs import Job, Jobs, JobState
from mqtemplate.errors import MessageError
from mqtemplate.message import Message
from mqtemplate.operations import BrokerAccess
from mqtemplate.pending import PendingQuery
from tests.console.pages import HOUR_MS, MANAGEMENT_TOKEN, TOKEN, Answer, Shop, open_shop
from tests.waiting import eventually


def audit(shop: Shop) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shop.audit_path.read_text("utf-8").splitlines()]


def confirm(shop: Shop, preview: Answer, path: str = "/delayed/change", **more: object) -> Answer:
    return shop.change(path, preview.form(path) | more)


# --- pending messages ---------------------------------------------------------------------------


def test_a_body_that_is_no_form_is_refused(shop: Shop) -> None:
    answer = shop.request("POST", "/delayed/preview", b"{}", content_type="application/json")

    assert answer.status == 400
    assert "a change must be sent as application/x-www-form-urlencoded, got application/json" in answer.text


def test_a_change_of_very_many_messages_counts_the_first_ones_by_topic_and_tag(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a million of them would take most of a minute. The job still checks all, before it changes the first."""
    monkeypatch.setattr("mqtemplate.operations.delayed.MOST_COUNTED", 3)
    monkeypatch.setattr("mqtemplate.console.delayed.MOST_COUNTED", 3)
    for hours in range(1, 7):
        shop.send_due(hours, f"due-{hours}", tag="trial" if hours < 3 else "paid")
    page = shop.page("/delayed")
    preview = shop.post("/delayed/preview", page.form("/delayed/preview", "Cancel all") | {"action": "cancel"})
    fewer = confirm(shop, preview, expected="5")
    done = confirm(shop, preview)

    assert "Cancel: 6 pending messages" in preview.text
    assert "By tag trial 2, paid 1 Due from 2026-01-01 01:00:00 By topic and tag are the first 3." in preview.text
    assert "the preview showed 5, and the change would reach more of them now; nothing was changed" in fewer.text
    assert ("6 cancelled" in done.text, shop.pending_keys()) == (True, [])


# --- dead letters -------------------------------------------------------------------------------


def fail(shop: Shop, *keys: str) -> None:
    for key in keys:
        shop.send("orders", f"refused {key}".encode(), key, note="gift")
    shop.harness.advance("1h")


@pytest.mark.feature("14.2")
def test_a_dead_letter_is_edited_and_sent_again(shop: Shop) -> None:
    fail(shop, "order-1")
    letters = shop.page("/dead-letters", group="billing")
    letter = shop.page(letters.link("order-1"))
    form = letter.form("/dead-letters/edit")
    names = form["name"]
    form["value"] = ["present" if name == "note" else value for name, value in zip(names, form["value"], strict=True)]

    sent = shop.change("/dead-letters/edit", form | {"body": "accepted\r\nnow"})
    shop.harness.advance("1s")

    assert "accepted now" in sent.text
    [delivery] = [each for each in shop.harness.assert_received("bill") if each.body == b"accepted\nnow"]
    assert delivery.properties["note"] == "present"
    assert delivery.keys == "order-1"
    assert "order-1" not in shop.page("/dead-letters", group="billing").text
    assert "resent" in shop.page("/dead-letters", group="billing", state="all").text


@pytest.mark.feature("14.2")
def test_chosen_dead_letters_are_purged(shop: Shop) -> None:
    fail(shop, "order-1", "order-2")
    page = shop.page("/dead-letters", group="billing")
    letter_id = page.link("order-1").rpartition("id=")[2]

    preview = shop.post(
        "/dead-letters/preview", page.form("/dead-letters/preview") | {"letter": [letter_id], "action": "purge"}
    )
    confirm(shop, preview, "/dead-letters/change")

    assert "Purge: 1 dead letter" in preview.text
    assert ">order-1<" not in shop.page("/dead-letters", group="billing").html
    assert ">order-2<" in shop.page("/dead-letters", group="billing").html


# --- the audit log ------------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_each_change_is_in_the_audit_log_and_a_log_event(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    sent = shop.send_due(1, "first")
    page = shop.page("/message", id=sent.msg_id)
    confirm(shop, shop.post("/delayed/preview", page.form("/delayed/preview") | {"action": "cancel"}))
    shop.change("/listeners/change", shop.page("/listeners").form("/listeners/change") | {"action": "pause"})

    lines = audit(shop)

    assert [(line["action"], line["state"]) for line in lines] == [
        ("delayed.cancel", "started"),
        ("delayed.cancel", "succeeded"),
        ("listener.pause", "started"),
        ("listener.pause", "succeeded"),
    ]
    assert lines[1] == {
        "time": "2026-01-01T00:00:00.000+00:00",
        "id": lines[0]["id"],
        "broker": "shop",
        "action": "delayed.cancel",
        "state": "succeeded",
        "remote": "10.0.0.7",
        "shown": 1,
        "cancelled": 1,
        "unsupported": 0,
    }
    assert [each["handle"] for each in lines[0]["old"]] == [sent.handle]
    assert stat.S_IMODE(shop.audit_path.stat().st_mode) == 0o600
    assert [str(each.msg).split(" ")[0] for each in caplog.records].count("dashboard.changed") == 2


def test_without_its_audit_log_nothing_changes(shop: Shop) -> None:
    shop.send_due(1, "first")
    page = shop.page("/delayed")
    preview = shop.post("/delayed/preview", page.form("/delayed/preview", "Cancel all") | {"action": "cancel"})
    shop.audit_path.unlink()
    shop.audit_path.mkdir()

    done = confirm(shop, preview)

    assert "failed" in done.text
    assert shop.pending_keys() == ["first"]


# --- long changes -------------------------------------------------------------------------------


def test_one_change_of_many_messages_runs_at_a_time() -> None:
    jobs = Jobs()
    first = jobs.start("first", 2, "/", _until_stopped)

    with pytest.raises(MessageError, match="another change is running: first; wait for it, or stop it"):
        jobs.start("second", None, "/", lambda job: "done")
    first.must_stop = True
    eventually(lambda: first.state is JobState.STOPPED, "the job has stopped")

    assert first.result.startswith("stopped after ")
    assert jobs.start("second", None, "/", lambda job: "done") is not first


def _until_stopped(job: Job) -> str:
    while True:
        job.advance(1)


# --- store directories --------------------------------------------------------------------------


def folder_with_messages(path: Path) -> None:
    with EmbeddedBroker(path) as broker:
        for hours in (1, 2):
            broker.sends.send(
                Message("reminders", b"x", {"TIMER_DELAY_MS": str(hours * HOUR_MS), "KEYS": f"due-{hours}"})
            )


@pytest.mark.feature("14.2")
def test_a_store_directory_is_read_from_a_snapshot_and_opened_by_the_first_change(tmp_path: Path) -> None:
    folder_with_messages(tmp_path / "store")
    source = FolderSource(tmp_path / "store")
    try:
        with source.reading() as access:
            assert source.is_snapshot
            assert [each.keys for each in access.broker.delayed.pending(PendingQuery()).messages] == ["due-1", "due-2"]
            with source.changing() as owner:
                assert owner.open_for_changes().delayed.cancel(key="due-1").count == 1
            # The snapshot stays open for its reader.
            assert len(access.broker.delayed.pending(PendingQuery()).messages) == 2
        with source.reading() as access:
            assert not source.is_snapshot
            assert [each.keys for each in access.broker.delayed.pending(PendingQuery()).messages] == ["due-2"]
    finally:
        source.close()


def test_a_store_directory_in_use_is_read_and_not_changed(tmp_path: Path) -> None:
    folder_with_messages(tmp_path / "store")
    access = Access(TOKEN, allow_changes=True)
    with EmbeddedBroker(tmp_path / "store") as owner:
        dashboard = Dashboard(
            FolderSource(tmp_path / "store"), access=access, audit=AuditLog(None, VirtualClock()), clock=VirtualClock()
        )
        shop = Shop(None, owner, dashboard, tmp_path)  # type: ignore[arg-type]  # there is no application
        assert shop.get("/sign-in", token=TOKEN).status == 303
        page = shop.page("/delayed")
        preview = shop.post("/delayed/preview", page.form("/delayed/preview", "Cancel all") | {"action": "cancel"})
        done = confirm(shop, preview)
        dashboard.close()

    assert "due-1" in page.text
    assert "snapshot" in page.text
    assert "failed" in done.text
    assert "store" in done.text


def test_a_dashboard_of_a_broker_without_an_application_says_what_to_start(tmp_path: Path) -> None:
    with EmbeddedBroker() as broker:
        source = OpenSource(BrokerAccess(broker), "memory")
        audit_log = AuditLog(None, VirtualClock())
        dashboard = Dashboard(source, access=Access(reads_need_token=False), audit=audit_log, clock=VirtualClock())
        shop = Shop(None, broker, dashboard, tmp_path)  # type: ignore[arg-type]

        texts = [shop.page(path).text for path in ("/listeners", "/lateness", "/configuration")]

    assert all("--app http://host:port" in text for text in texts)


def test_a_dashboard_of_an_application_without_a_broker_says_what_to_start(shop: Shop) -> None:
    from mqtemplate.console import Actuator
    from mqtemplate.console.client import LocalActuator

    documents = LocalActuator(shop.app.get(Actuator), MANAGEMENT_TOKEN)
    access, log = Access(reads_need_token=False), AuditLog(None, VirtualClock())
    alone = Shop(
        shop.app,
        shop.broker,
        Dashboard(None, documents, access=access, audit=log, clock=VirtualClock()),
        shop.audit_path,
    )

    assert "bill" in alone.page("/listeners").text
    assert "UP 1 listener" in alone.page("/").text
    assert ">Topics<" not in alone.page("/").html
    assert alone.get("/topics").status == 501
    assert "start it with --store or --name-server too" in alone.get("/topics").text


def test_the_page_of_listeners_shows_how_a_listener_receives_by_pop(tmp_path: Path) -> None:
    encode = message_listener("videos", "encoders", id="encode", request_mode="POP")(_ignore)
    with open_shop(tmp_path, components=(encode,)) as shop:
        shop.sign_in()
        text = shop.page("/listeners").text

    assert "CONCURRENTLY, CLUSTERING, POP: invisible for 1m, 0 renewals, 0 expired" in text


def _ignore(video: str) -> None: ...
