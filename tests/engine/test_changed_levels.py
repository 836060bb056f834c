"""Delay levels that were changed at run time: they survive a restart, and an edit of the configuration wins again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, StoreFormatError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery

CONFIGURED, CHANGED, EDITED = "1s 5s", "7s 9s 1h", "3s 4s"


def broker(folder: Path, levels: str = CONFIGURED) -> EmbeddedBroker:
    return EmbeddedBroker(folder, EmbeddedSettings(message_delay_level=levels), VirtualClock(1_000_000))


def levels_of(folder: Path, configured: str = CONFIGURED) -> str:
    """Return the levels in force after a start."""
    with broker(folder, configured) as started:
        return started.engine.levels.text


def test_a_change_at_run_time_survives_restarts_and_is_logged(tmp_path: Path) -> None:
    with broker(tmp_path) as running:
        running.change_delay_levels(CHANGED)
        running.sends.send(Message("orders", b"x", properties={Property.DELAY: "3"}))

    with capture_logs() as events:
        found = [levels_of(tmp_path), levels_of(tmp_path)]

    assert found == [CHANGED, CHANGED]
    restored = [event for event in events if event["event"] == "delay_levels.change_restored"]
    assert [(event["levels"], event["configured"]) for event in restored] == [(CHANGED, CONFIGURED)] * 2
    assert "mqtemplate.broker.message-delay-level wins again" in restored[0]["hint"]


def test_messages_that_are_sent_after_the_restart_use_the_changed_levels(tmp_path: Path) -> None:
    with broker(tmp_path) as running:
        running.change_delay_levels(CHANGED)

    with broker(tmp_path) as again:
        sent = again.sends.send(Message("orders", b"x", properties={Property.DELAY: "1"}))
        [pending] = again.delayed.pending(PendingQuery()).messages

    assert pending.deliver_ms - pending.store_timestamp == 7_000
    assert pending.msg_id == sent.msg_id


def test_an_edit_of_the_configuration_wins_over_the_earlier_change(tmp_path: Path) -> None:
    with broker(tmp_path) as running:
        running.change_delay_levels(CHANGED)

    with capture_logs() as events:
        found = levels_of(tmp_path, EDITED)

    assert found == EDITED
    [ignored] = [event for event in events if event["event"] == "delay_levels.change_ignored"]
    assert (ignored["levels"], ignored["changed"], ignored["configured_then"]) == (EDITED, CHANGED, CONFIGURED)


def test_a_program_with_other_settings_does_not_end_the_change(tmp_path: Path) -> None:
    """A command on the folder, from a directory without the configuration, starts a broker with the defaults."""
    with broker(tmp_path) as running:
        running.change_delay_levels(CHANGED)

    assert [levels_of(tmp_path, "1m"), levels_of(tmp_path)] == ["1m", CHANGED]


def test_the_configured_table_as_a_change_ends_the_change(tmp_path: Path) -> None:
    with broker(tmp_path) as running:
        running.change_delay_levels(CHANGED)
        running.change_delay_levels("1s   5s")

    assert levels_of(tmp_path) == CONFIGURED
    assert not list((tmp_path / "config").glob("delayLevels.json*"))


def test_a_table_that_the_configuration_has_now_replaces_the_change(tmp_path: Path) -> None:
    """As a reload of the configuration does it."""
    with broker(tmp_path) as running:
        running.change_delay_levels(CHANGED)
        running.engine.configure_delay_levels(EDITED)
        assert running.engine.levels.text == EDITED

    assert [levels_of(tmp_path, EDITED), levels_of(tmp_path)] == [EDITED, CONFIGURED]


def test_a_change_before_the_start_is_the_configuration(tmp_path: Path) -> None:
    created = broker(tmp_path)
    created.change_delay_levels(EDITED)
    with created:
        assert created.engine.levels.text == EDITED

    assert levels_of(tmp_path) == CONFIGURED


def test_an_invalid_table_changes_nothing(tmp_path: Path) -> None:
    with broker(tmp_path) as running:
        with pytest.raises(ConfigurationError, match="soon"):
            running.change_delay_levels("1s soon")
        assert running.engine.levels.text == CONFIGURED


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"messageDelayLevel": "9s"}, "has unexpected content .'configuredDelayLevel' is missing."),
        (
            {"messageDelayLevel": "9 weeks", "configuredDelayLevel": CONFIGURED},
            "config/delayLevels.json: .*correct it, or delete the file and its .bak",
        ),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path, table: dict[str, str], problem: str) -> None:
    levels_of(tmp_path)
    (tmp_path / "config" / "delayLevels.json").write_text(json.dumps(table))

    with pytest.raises(StoreFormatError, match=problem):
        broker(tmp_path).start()
