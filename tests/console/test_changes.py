"""Changes by the dashboard: pending messages, dead letters, listeners, and their audit log."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Access, AuditLog, Dashboard, FolderSource, OpenSource
from mqtemplate.console.changes import Job, Jobs, JobState
from mqtemplate.errors import ConfigurationError, MessageError
from mqtemplate.message import Message
from mqtemplate.operations import EmbeddedAdmin
from mqtemplate.pending import PendingQuery
from tests.console.pages import COMPLETE, HOUR_MS, MANAGEMENT_TOKEN, TOKEN, Answer, Shop, bill, open_shop, report
from tests.waiting import eventually


def audit(shop: Shop) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shop.audit_path.read_text("utf-8").splitlines()]


def confirm(shop: Shop, preview: Answer, path: str = "/delayed/change", **more: object) -> Answer:
    return shop.change(path, preview.form(path) | more)


# --- pending messages ---------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_one_message_is_cancelled_after_a_preview(shop: Shop) -> None:
    sent = shop.send_due(1, "first")
    shop.send_due(2, "second")
    message = shop.page("/message", id=sent.msg_id)

    preview = shop.post("/delayed/preview", message.form("/delayed/preview") | {"action": "cancel"})
    before = shop.pending_keys()
    done = confirm(shop, preview)

    assert "Cancel: 1 pending message" in preview.text
    assert before == ["first", "second"]
    assert "succeeded 1 of 1" in done.text
    assert "1 cancelled" in done.text
    assert shop.pending_keys() == ["second"]
    assert "cancelled" in shop.page("/message", id=sent.msg_id, topic="reminders").text


@pytest.mark.feature("14.2")
def test_chosen_messages_are_delivered_now(shop: Shop) -> None:
    handles = [shop.send_due(hours, f"due-{hours}", topic="orders").handle for hours in (1, 2, 3)]
    page = shop.page("/delayed")
    chosen = page.form("/delayed/preview") | {"handle": handles[:2], "action": "deliver"}

    preview = shop.post("/delayed/preview", chosen)
    confirm(shop, preview)
    shop.harness.advance("2s")

    assert "Deliver now: 2 pending messages" in preview.text
    assert shop.pending_keys() == ["due-3"]
    assert len(shop.harness.assert_received("bill")) == 2


@pytest.mark.feature("14.2")
def test_all_that_match_are_shifted(shop: Shop) -> None:
    shop.send_due(1, "trial", tag="trial")
    shop.send_due(2, "paid", tag="paid")
    page = shop.page("/delayed", tag="trial")

    preview = shop.post(
        "/delayed/preview", page.form("/delayed/preview", "Shift all") | {"action": "shift", "shift": "5h"}
    )
    confirm(shop, preview)

    assert "Shift: 1 pending message" in preview.text
    found = shop.broker.pending(PendingQuery()).messages
    now_ms = shop.broker.clock.now_ms()
    assert [(each.keys, each.deliver_ms - now_ms) for each in found] == [("paid", 2 * HOUR_MS), ("trial", 6 * HOUR_MS)]


@pytest.mark.feature("14.2")
def test_messages_that_are_stored_after_the_preview_are_left_alone(shop: Shop) -> None:
    shop.send_due(1, "seen")
    page = shop.page("/delayed")
    preview = shop.post("/delayed/preview", page.form("/delayed/preview", "Cancel all") | {"action": "cancel"})
    shop.harness.advance("1s")
    shop.send_due(1, "new")

    confirm(shop, preview)

    assert "There is no filter: this changes all pending messages" in preview.text
    assert shop.pending_keys() == ["new"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"action": "drop", "scope": "all"}, "action must be one of cancel, deliver, shift, got 'drop'"),
        ({"action": "cancel"}, "scope must be chosen or all, got ''"),
        ({"action": "cancel", "scope": "chosen"}, "no message is chosen; tick some, or change all that match"),
        ({"action": "shift", "scope": "all", "shift": "soon"}, "shift must be a duration such as 30m, 2h or -15m"),
        ({"action": "cancel", "scope": "all", "rate": "0"}, "the rate must be a number above 0 per second, got '0'"),
        ({"action": "cancel", "scope": "all", "from": "x"}, "from must be a time such as"),
        ({"action": "cancel", "scope": "all", "until": "1", "expected": "many"}, "expected must be a whole number"),
    ],
)
def test_an_incomplete_change_is_refused(shop: Shop, fields: dict[str, str], text: str) -> None:
    form = COMPLETE | {"form_token": shop.form_token()}

    answer = shop.post("/delayed/change" if "until" in fields else "/delayed/preview", form | fields)

    assert answer.status == 400
    assert text in answer.text


def test_a_change_without_its_preview_is_refused(shop: Shop) -> None:
    shop.send_due(1, "first")
    form = COMPLETE | {"form_token": shop.form_token()}

    answer = shop.post("/delayed/change", form | {"action": "cancel", "scope": "all"})

    assert answer.status == 400
    assert "a change needs its preview first" in answer.text
    assert shop.pending_keys() == ["first"]


def test_a_body_that_is_no_form_is_refused(shop: Shop) -> None:
    answer = shop.request("POST", "/delayed/preview", b"{}", content_type="application/json")

    assert answer.status == 400
    assert "a change must be sent as application/x-www-form-urlencoded, got application/json" in answer.text


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
def test_dead_letters_are_sent_again_by_filter(shop: Shop) -> None:
    fail(shop, "order-1", "order-2")
    page = shop.page("/dead-letters", group="billing", key="order-2")

    preview = shop.post(
        "/dead-letters/preview", page.form("/dead-letters/preview", "Resend all") | {"action": "resend"}
    )
    done = confirm(shop, preview, "/dead-letters/change")

    assert "Resend: 1 dead letter" in preview.text
    assert "1 sent again" in done.text
    assert "order-1" in shop.page("/dead-letters", group="billing").text
    assert ">order-2<" not in shop.page("/dead-letters", group="billing").html


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


def test_a_change_of_dead_letters_names_what_it_lacks(shop: Shop) -> None:
    fail(shop, "order-1")
    form = COMPLETE | {"form_token": shop.form_token(), "group": "billing"}

    def text(path: str, **fields: str) -> str:
        answer = shop.post(path, form | fields)
        assert answer.status == 400
        return answer.text

    assert "action must be one of resend, purge, got 'eat'" in text("/dead-letters/preview", action="eat")
    chosen = {"action": "purge", "scope": "chosen"}
    assert "no dead letter is chosen" in text("/dead-letters/preview", **chosen)
    assert "reload the list" in text("/dead-letters/preview", **chosen, letter="0" * 32)
    assert "a change needs its preview first" in text("/dead-letters/change", **chosen)


# --- listeners ----------------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_a_listener_is_paused_moved_and_resumed(shop: Shop) -> None:
    shop.send("orders", b"x")
    shop.harness.advance("1s")

    paused = shop.change("/listeners/change", shop.page("/listeners").form("/listeners/change") | {"action": "pause"})
    shop.change("/listeners/change", paused.form("/listeners/change") | {"action": "seek", "to": "first", "back": ""})
    resumed = shop.change("/listeners/change", paused.form("/listeners/change") | {"action": "resume"})
    shop.harness.advance("1s")

    assert "bill paused" in paused.text
    assert "bill running" in resumed.text
    assert len(shop.harness.assert_received("bill")) == 2


@pytest.mark.feature("14.2")
def test_the_concurrency_of_a_listener_is_changed(shop: Shop) -> None:
    form = shop.page("/listeners").form("/listeners/change") | {"action": "concurrency"}

    changed = shop.change("/listeners/change", form | {"number": "7"})
    too_many = shop.post("/listeners/change", form | {"number": "65"})
    missing = shop.post("/listeners/change", form | {"number": ""})

    assert "7 handlers at a time" in changed.text
    assert shop.app.containers[0].concurrency == 7
    assert "must be 1..64, its consume_thread_max, got 65" in too_many.text
    assert "give the number of handlers that may run at a time" in missing.text
    done = [(line["action"], line["to"]) for line in audit(shop) if line["action"] == "listener.concurrency"]
    assert done[0] == ("listener.concurrency", 7)


def test_an_invalid_change_of_a_listener_is_refused(shop: Shop) -> None:
    form = shop.page("/listeners").form("/listeners/change")

    unknown = shop.post("/listeners/change", form | {"action": "stop"})
    nowhere = shop.post("/listeners/change", form | {"action": "seek", "to": "middle", "back": ""})
    span = shop.post("/listeners/change", form | {"action": "seek", "back": "soon"})

    assert "action must be one of pause, resume, seek, concurrency, got 'stop'" in unknown.text
    assert "choose the first message, the latest, or a duration to go back" in nowhere.text
    assert (span.status, "span must be" in span.text) == (503, True)


@pytest.mark.feature("14.2")
def test_a_schedule_is_paused_resumed_and_run_now(tmp_path: Path) -> None:
    with open_shop(tmp_path, components=(bill, report)) as shop:
        shop.sign_in()
        form = shop.page("/schedules").form("/schedules/change")

        paused = shop.change("/schedules/change", form | {"action": "pause"})
        resumed = shop.change("/schedules/change", form | {"action": "resume"})
        shop.change("/schedules/change", form | {"action": "trigger"})
        unknown = shop.post("/schedules/change", form | {"action": "stop"})

    assert "report every 1d 2026-01-02 00:00:00 paused" in paused.text
    assert "report every 1d 2026-01-02 00:00:00 active" in resumed.text
    assert [line["action"] for line in audit(shop)[::2]] == ["schedule.pause", "schedule.resume", "schedule.trigger"]
    assert "action must be one of pause, resume, trigger, got 'stop'" in unknown.text


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
        "action": "delayed.cancel",
        "state": "succeeded",
        "remote": "10.0.0.7",
        "handles": [sent.handle],
        "shown": 1,
        "cancelled": 1,
        "unsupported": 0,
    }
    assert stat.S_IMODE(shop.audit_path.stat().st_mode) == 0o600
    assert [str(each.msg).split(" ")[0] for each in caplog.records].count("dashboard.changed") == 2


def test_a_change_that_fails_is_in_the_audit_log(shop: Shop) -> None:
    form = shop.page("/listeners").form("/listeners/change") | {"action": "pause", "listener": "other"}

    answer = shop.post("/listeners/change", form)

    assert (answer.status, "there is no listener 'other'" in answer.text) == (404, True)
    assert [line["state"] for line in audit(shop)] == ["started", "failed"]
    assert "there is no listener 'other'" in audit(shop)[1]["error"]


def test_an_audit_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(ConfigurationError, match=r"the audit log .*/link cannot be written: .*; choose another file"):
        AuditLog(tmp_path / "link", VirtualClock())


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
    first.stop()
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
            broker.send(Message("reminders", b"x", {"TIMER_DELAY_MS": str(hours * HOUR_MS), "KEYS": f"due-{hours}"}))


@pytest.mark.feature("14.2")
def test_a_store_directory_is_read_from_a_snapshot_and_opened_by_the_first_change(tmp_path: Path) -> None:
    folder_with_messages(tmp_path / "store")
    source = FolderSource(tmp_path / "store")
    try:
        with source.reading() as admin:
            assert source.is_snapshot
            assert [each.keys for each in admin.broker.pending(PendingQuery()).messages] == ["due-1", "due-2"]
            with source.changing() as owner:
                assert owner.open_for_changes().cancel(key="due-1").count == 1
            # The snapshot stays open for its reader.
            assert len(admin.broker.pending(PendingQuery()).messages) == 2
        with source.reading() as admin:
            assert not source.is_snapshot
            assert [each.keys for each in admin.broker.pending(PendingQuery()).messages] == ["due-2"]
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
        source = OpenSource(EmbeddedAdmin(broker), "memory")
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
