"""The audit log: lines of changes, their values of before, and what is read from it again."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, UnknownNameError
from mqtemplate.operations.audit import AuditLimits, AuditLog


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def values(count: int) -> list[dict[str, Any]]:
    return [{"queue": number, "before": number * 10} for number in range(count)]


def test_few_old_values_are_in_the_first_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock())

    with log.change("offsets.reset", "10.0.0.7", values(2), group="billing") as entry:
        entry.result["skipped"] = 5

    started, done = lines(tmp_path / "audit.jsonl")
    assert started == {
        "time": "2026-01-01T00:00:00.000+00:00",
        "id": entry.id,
        "action": "offsets.reset",
        "state": "started",
        "remote": "10.0.0.7",
        "group": "billing",
        "old": values(2),
    }
    assert (done["id"], done["state"], done["skipped"], "old" in done) == (entry.id, "succeeded", 5, False)
    assert list(log.get(entry.id).old()) == values(2)


def test_many_old_values_are_in_a_file_beside_the_log_that_only_its_user_reads(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock(), user="ada")

    with log.change("delayed.cancel", None, iter(values(2_675)), shown=2_675) as entry:
        assert list(entry.old()) == values(2_675)

    path = tmp_path / "audit.old" / f"{entry.id}.jsonl"
    assert lines(tmp_path / "audit.jsonl")[0]["old_file"] == f"audit.old/{entry.id}.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    logged = AuditLog(tmp_path / "audit.jsonl", VirtualClock()).get(entry.id)
    assert (logged.author, logged.state, logged.old.exists) == ("ada", "succeeded", True)
    assert list(logged.old()) == values(2_675)


def test_old_values_whose_file_was_deleted_are_an_error(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock())
    with log.change("delayed.cancel", None, values(30)) as entry:
        pass
    (tmp_path / "audit.old" / f"{entry.id}.jsonl").unlink()

    assert not log.get(entry.id).old.exists
    with pytest.raises(UnknownNameError, match=r"the old values in .*\.jsonl were deleted, so nothing can be undone"):
        list(log.get(entry.id).old())


def test_old_values_that_cannot_be_read_prevent_the_change(tmp_path: Path) -> None:
    """They are complete before anything changes."""

    def broken() -> Any:
        yield from values(25)
        raise ValueError("the preview showed 25")

    log, done = AuditLog(tmp_path / "audit.jsonl", VirtualClock()), []
    with pytest.raises(ValueError, match="the preview showed 25"), log.change("delayed.cancel", None, broken()):
        done.append("changed")

    assert done == []
    assert lines(tmp_path / "audit.jsonl") == []


def test_a_failed_change_keeps_its_old_values_and_its_error(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock())

    with pytest.raises(OSError), log.change("delayed.shift", "10.0.0.7", values(1)) as entry:
        raise OSError("disk full")

    logged = log.get(entry.id)
    assert (logged.state, logged.facts["error"], list(logged.old())) == ("failed", "OSError: disk full", values(1))


def test_the_newest_changes_come_first_and_know_what_has_undone_them(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock())
    with log.change("offsets.reset", "10.0.0.7") as first:
        pass
    with log.change("offsets.reset", "10.0.0.7", undo_of=first.id) as second:
        pass
    with (tmp_path / "audit.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": 7}\nnot JSON\n{"id": "cut off')

    found = log.recent(10)

    assert [(each.id, each.undone_by) for each in found] == [(second.id, None), (first.id, second.id)]
    assert [each.id for each in log.recent(1)] == [second.id]


def test_without_a_file_the_last_changes_are_in_memory() -> None:
    log = AuditLog(None, VirtualClock())
    ids = []
    for number in range(150):
        with log.change("offsets.reset", "10.0.0.7", values(number)) as entry:
            ids.append(entry.id)

    assert [each.id for each in log.recent(200)] == ids[:-101:-1]
    assert list(log.get(ids[-1]).old()) == values(149)
    with pytest.raises(UnknownNameError, match=f"no change '{ids[0]}' in the memory of this process; list them with"):
        log.get(ids[0])


def test_an_audit_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(ConfigurationError, match=r"the audit log .*/link cannot be written: .*; choose another file"):
        AuditLog(tmp_path / "link", VirtualClock())


# --- the space on the disk ------------------------------------------------------------------------

SMALL = AuditLimits(max_bytes=1_000, max_files=3, max_value_files=4, max_value_bytes=100_000)


def many(log: AuditLog, count: int, old: int = 0) -> list[str]:
    ids = []
    for _ in range(count):
        with log.change("offsets.reset", "10.0.0.7", values(old), group="billing") as entry:
            pass
        ids.append(entry.id)
    return ids


def test_a_full_log_is_renamed_and_read_as_one(tmp_path: Path) -> None:
    """The two lines of a change may be in two files, and the clock may step back."""
    clock = VirtualClock()
    log = AuditLog(tmp_path / "audit.jsonl", clock, limits=SMALL)
    other = AuditLog(tmp_path / "audit.jsonl", clock, limits=SMALL)

    ids = [*many(log, 3), *many(other, 2)]
    clock.set_ms(clock.now_ms() - 3_600_000)
    ids += many(log, 1)

    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert 1 < len(files) <= 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert [(each.id, each.state) for each in other.recent(9)] == [(each, "succeeded") for each in reversed(ids)]
    assert log.get(ids[0]).action == "offsets.reset"


def test_a_log_takes_no_more_space_than_its_limits(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock(), limits=SMALL)

    ids = many(log, 60)

    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) == 3
    assert max(path.stat().st_size for path in files) < 1_500
    assert log.recent(1)[0].id == ids[-1]
    with pytest.raises(UnknownNameError, match="there is no change"):
        log.get(ids[0])


def test_the_oldest_file_is_deleted_whatever_its_random_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still: the files differ by their number, and the random parts descend."""
    descending = itertools.count(0xFFFF, -1)
    monkeypatch.setattr(secrets, "token_hex", lambda length: f"{next(descending):0{2 * length}x}")
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock(), limits=SMALL)

    ids = many(log, 60)

    found = [each.id for each in log.recent(60)]
    assert 4 < len(found) < 20
    assert found == ids[: -len(found) - 1 : -1]


def test_old_values_are_deleted_with_their_lines_and_beyond_their_limit(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock(), limits=replace(SMALL, max_value_files=1_000))
    first, *_ = many(log, 1, old=30)
    assert log.get(first).old.exists
    many(log, 30)
    assert not list((tmp_path / "audit.old").iterdir())

    ids = many(AuditLog(tmp_path / "audit.jsonl", VirtualClock(), limits=replace(SMALL, max_bytes=1 << 20)), 9, old=30)
    assert {path.stem for path in (tmp_path / "audit.old").iterdir()} == set(ids[-4:])
    assert [log.get(each).old.exists for each in ids] == [False] * 5 + [True] * 4

    large = AuditLog(tmp_path / "audit.jsonl", VirtualClock(), limits=replace(SMALL, max_value_bytes=10))
    [newest] = many(large, 1, old=5_000)
    assert {path.stem for path in (tmp_path / "audit.old").iterdir()} == {newest}


def test_a_log_that_cannot_be_renamed_grows_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    log = AuditLog(tmp_path / "audit.jsonl", VirtualClock(), limits=SMALL)
    monkeypatch.setattr(Path, "rename", refused)
    with capture_logs() as events:
        many(log, 5)

    assert {(each["event"], each["reason"]) for each in events} == {("audit.not_rotated", "Operation not permitted")}
    assert len(log.recent(9)) == 5
