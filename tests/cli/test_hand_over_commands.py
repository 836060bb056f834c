"""``hand-over``: plan, start, status, pause, resume, abort, confirm, and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mqtemplate.broker.hand_over import HandOverPhase
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.pending import PendingQuery
from tests.cli.running import CommandLine, Result, prepare


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    (tmp_path / "config").mkdir()
    with EmbeddedBroker(tmp_path / "old") as owner:
        prepare(owner)
    with EmbeddedBroker(tmp_path / "new"):
        pass
    return CommandLine("", tmp_path / "config", capsys)


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, ...]:
    """The options that name both brokers: two store directories."""
    return ("--from", str(tmp_path / "old"), "--to", f"embedded:{tmp_path / 'new'}")


def called(line: CommandLine, name: str, *arguments: str) -> Result:
    return line.plain("hand-over", name, *arguments, "--config", str(line.config))


def phase(folder: Path) -> HandOverPhase | None:
    with EmbeddedBroker(folder) as broker:
        state = broker.hand_over.state()
        return None if state is None else state.phase


def test_a_plan_shows_pending_messages_topics_and_groups(line: CommandLine, sides: tuple[str, ...]) -> None:
    shown = called(line, "plan", *sides)

    assert shown.code == 0, shown
    assert "4 pending messages:" in shown.output
    assert "4 move now, in about" in shown.output
    assert "by topic: reminders 4" in shown.output
    orders = next(each.split() for each in shown.output.splitlines() if each.startswith("orders"))
    assert orders == ["orders", "2", "0", "read,", "write", "4", "to", "create"]
    assert "billing" in shown.output
    document = called(line, "plan", *sides, "--json").json
    assert (document["pending"], document["moves"]["count"], document["rate"]) == (4, 4, 1_000)


def test_a_plan_needs_the_old_broker(line: CommandLine) -> None:
    refused = called(line, "plan", "--to", "127.0.0.1:1")

    assert refused.code == 2
    assert "the old broker is not known: give --from" in refused.errors


def test_both_brokers_must_differ(line: CommandLine, tmp_path: Path) -> None:
    refused = called(line, "plan", "--from", str(tmp_path / "old"), "--to", f"embedded:{tmp_path / 'old'}")

    assert refused.code == 1
    assert "both are one broker" in refused.errors


def test_a_run_moves_everything_of_a_directory(line: CommandLine, sides: tuple[str, ...], tmp_path: Path) -> None:
    moved = called(line, "run", *sides, "--yes")

    assert moved.code == 0, moved
    assert "4 pending messages moved to" in moved.output
    assert "offsets of 1 groups set: billing" in moved.output
    assert "seal it with: mqtemplate hand-over confirm --from" in moved.output
    with EmbeddedBroker(tmp_path / "new") as new:
        assert new.delayed.count_pending(PendingQuery()).total == 4
        assert new.admin().group("billing").lag == 4
    again = called(line, "run", *sides, "--yes", "--json")
    assert (again.code, json.loads(again.output[again.output.index("{") :])["copied"]) == (0, 0)


def test_a_run_asks_first(line: CommandLine, sides: tuple[str, ...], tmp_path: Path) -> None:
    refused = called(line, "run", *sides)

    assert refused.code == 2
    assert "Move" in refused.errors
    assert "add --yes, or --dry-run" in refused.errors
    assert phase(tmp_path / "old") is None
    assert called(line, "run", *sides, "--dry-run").code == 0
    assert phase(tmp_path / "old") is None


def test_a_directory_in_use_is_not_run(line: CommandLine, sides: tuple[str, ...], tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "old"):
        refused = called(line, "run", *sides, "--yes")

    assert refused.code == 5
    assert "in use" in refused.errors


def test_a_hand_over_is_started_paused_resumed_and_aborted(
    line: CommandLine, sides: tuple[str, ...], tmp_path: Path
) -> None:
    old = sides[:2]
    assert "there is no hand-over from this broker" in called(line, "status", *old).errors

    started = called(line, "start", *sides, "--yes")

    assert started.code == 0, started
    assert "set mqtemplate.hand-over.from to embedded:" in started.output
    assert "of the audit log" in started.errors
    for name, expected in (
        ("pause", HandOverPhase.PAUSED),
        ("resume", HandOverPhase.RUNNING),
        ("abort", HandOverPhase.ABORTING),
    ):
        changed = called(line, name, *old, "--yes")
        assert changed.code == 0, changed
        assert phase(tmp_path / "old") is expected


def test_the_status_has_a_bar_days_and_lags(line: CommandLine, sides: tuple[str, ...]) -> None:
    called(line, "start", *sides, "--yes")

    shown = called(line, "status", *sides)

    assert shown.code == 0, shown
    assert ": RUNNING since" in shown.output
    assert "] 0%" in shown.output
    assert "0 moved, 0 in transit, 4 pending" in shown.output
    assert "left by day:" in shown.output
    assert next(each.split() for each in shown.output.splitlines() if each.startswith("billing"))[1] == "4"
    document = called(line, "status", *sides, "--json").json
    assert (document["phase"], document["pending"], document["groups"][0]["old"]) == ("RUNNING", 4, 4)


def test_only_an_empty_broker_is_confirmed(line: CommandLine, sides: tuple[str, ...], tmp_path: Path) -> None:
    called(line, "start", *sides, "--yes")

    refused = called(line, "confirm", *sides[:2], "--yes")

    assert refused.code == 1
    assert "the old broker is not empty" in refused.errors
    called(line, "run", *sides, "--yes")
    confirmed = called(line, "confirm", *sides[:2], "--yes")
    assert confirmed.code == 0, confirmed
    assert "Remove mqtemplate.hand-over from application.yml" in confirmed.output
    assert phase(tmp_path / "old") is HandOverPhase.CONFIRMED
