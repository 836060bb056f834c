"""``doctor``: it has a verdict about every directory, and its repair writes to nothing but the directory."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import MQTemplateError, StoreError
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.operations import repair as repair_module
from mqtemplate.operations.doctor import examine
from mqtemplate.operations.repair import repair
from mqtemplate.results import TransactionState
from mqtemplate.store.files.mapped_files import only_zeros

QUEUE = MessageQueue("orders", "broker-a", 0)
SETTINGS = EmbeddedSettings(mapped_file_size_commit_log=1 << 20)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with messages, levels, timers, transactions, sequences and committed offsets."""
    folder = tmp_path_factory.mktemp("original") / "store"
    with EmbeddedBroker(folder, SETTINGS, VirtualClock()) as broker:
        for number in range(40):
            broker.sends.send(Message("orders", b"%d" % number * 100, {"KEYS": f"k{number}"}), QUEUE)
        broker.sends.send(Message("orders", b"level", {"DELAY": "9"}))
        broker.delayed.cancel(broker.sends.send(Message("orders", b"timer", {"TIMER_DELAY_MS": "60000"})).handle)
        broker.sends.send(Message("orders", b"timer", {"TIMER_DELAY_MS": "120000"}))
        broker.transactions.end_transaction(
            broker.sends.send_half(Message("orders", b"half"), "billing"), TransactionState.COMMIT
        )
        broker.sends.send_half(Message("orders", b"open"), "billing")
        broker.sends.send_sequenced([(Message("orders", b"x"), QUEUE)], SendSequence("app", 1, 0))
        broker.groups.commit_offset("billing", QUEUE, 3)
    return folder


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    return copied(original, tmp_path / "store")


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, symlinks=True, copy_function=_copy_sparse)
    return target


def _copy_sparse(source: str, target: str) -> None:
    """Copy a file; 38 MB of zeros in a timer wheel take no time."""
    with Path(source).open("rb") as reading, Path(target).open("wb") as writing:
        while data := reading.read(1 << 20):
            if only_zeros(data):
                writing.seek(len(data), os.SEEK_CUR)
            else:
                writing.write(data)
        writing.truncate()


# --- a verdict about every directory --------------------------------------------------------------


def damage(path: Path, chance: random.Random) -> None:
    """Change a file as a disk, a copy, or another user may have changed it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        match chance.choice(["flip", "flip", "overwrite", "cut", "extend", "empty", "other content"]):
            case "flip":
                for _ in range(chance.choice([1, 8])):
                    at = chance.randrange(min(size, 16_384) or 1)
                    file.seek(at)
                    old = file.read(1) or b"\0"
                    file.seek(at)
                    file.write(bytes([old[0] ^ 1 << chance.randrange(4)]))
            case "overwrite":
                file.seek(chance.randrange(min(size, 16_384) or 1))
                file.write(chance.choice([bytes(40), b"\xff" * 8, chance.randbytes(40)]))
            case "cut":
                file.truncate(chance.randrange(size + 1))
            case "extend":
                file.seek(size)
                file.write(chance.randbytes(chance.choice([1, 5_000])))
            case "empty":
                file.truncate(0)
            case _:
                text = file.read() if path.suffix in (".json", ".bak") else b""
                values = list(re.finditer(rb'-?\d+|"[^"]*"', text))
                given = chance.choice(
                    [b"-1", b"null", b"[]", b"{}", b'"x"', b"1e999", b"9" * 5_000, b"1.5", b'"../x"', b"[" * 100_000]
                )
                start, end = chance.choice(values).span() if values else (0, 0)
                file.seek(0)
                file.truncate()
                file.write(text[:start] + given + text[end:])


def error_of_start(folder: Path) -> MQTemplateError | None:
    """Start and close a broker; another error than one of this library fails the test."""
    try:
        with EmbeddedBroker(folder, SETTINGS, VirtualClock()):
            return None
    except MQTemplateError as exc:
        return exc


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_of_every_kind_get_a_verdict(original: Path, tmp_path: Path, seed: int) -> None:
    """Each damage is examined, and opened: both end with a result or with an error of this library."""
    names = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    by_kind = {str(name if name.parts[0] == "config" else name.parts[0]): name for name in names}
    for kind, name in by_kind.items():
        chance = random.Random(f"{seed} {kind}")
        folder = copied(original, tmp_path / kind.replace("/", "-"))
        damage(folder / name, chance)

        report = examine(folder, SETTINGS)
        error = error_of_start(folder)

        assert (report.problem is None) == (error is None), f"{kind}: doctor: {report.problem}, start: {error}"
        shutil.rmtree(folder)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless_link(path: Path) -> None:
    path.symlink_to(path.name)


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "missing")


def outside_link(path: Path) -> None:
    outside = path.parents[2] / f"outside-{path.name}"
    outside.write_text('{"dataVersion": {}}', "ascii")
    path.symlink_to(outside)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        server.bind(path.name)
        os.chdir(here)


STRANGE = {
    "pipe": pipe,
    "endless": endless_link,
    "dangling": dangling_link,
    "outside": outside_link,
    "folder": Path.mkdir,
}
NAMES = ("lock", "checkpoint", "abort", "config/topics.json", "config/timercheck", "timerwheel", "commitlog/FIRST")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [*STRANGE, "socket"])
def test_something_else_in_place_of_a_file_gets_a_verdict(store: Path, name: str, kind: str) -> None:
    path = store / name.replace("FIRST", "0" * 20)
    path.unlink(missing_ok=True)
    (STRANGE | {"socket": bound_socket})[kind](path)

    report = examine(store, SETTINGS)

    assert report.problem is None or "Error:" not in report.problem, report.problem


@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "consumequeue/orders", "index", "config", "timerlog"])
@pytest.mark.parametrize("kind", ["file", "link", "dangling", "missing"])
def test_something_else_in_place_of_a_folder_gets_a_verdict(store: Path, name: str, kind: str) -> None:
    path = store / name
    path.rename(store.parent / "moved")
    if kind == "file":
        path.write_bytes(b"x")
    elif kind != "missing":
        path.symlink_to(store.parent / ("moved" if kind == "link" else "nowhere"))

    report = examine(store, SETTINGS)

    assert report.problem is None or "Error:" not in report.problem, report.problem
    if kind == "link":
        assert report.problem is not None
        assert f"{path} is a symbolic link" in report.problem


@pytest.fixture
def deep_store(store: Path) -> Iterator[Path]:
    """A store with folders that are nested more deeply than Python's stack."""
    at = os.open(store, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    yield store
    subprocess.run(["rm", "-rf", str(store / "d")], check=True)  # `shutil.rmtree`, which pytest uses, is recursive


def test_folders_below_folders_without_end_get_a_verdict(deep_store: Path) -> None:
    assert examine(deep_store, SETTINGS).problem is None
    with pytest.raises(StoreError, match="is nested too deeply for a store directory; move it away"):
        repair(deep_store, deep_store.with_name("copy"), SETTINGS)


def test_an_error_that_no_reader_foresees_is_a_verdict(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("mqtemplate.operations.doctor.check_log", fail)

    problem = examine(store, SETTINGS).problem

    assert problem == ("ZeroDivisionError: division by zero; the file that causes it is not known, so restore a backup")


# --- the repair -----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        "consumequeue",
        "index",
        "timerlog",
        "config",
        "consumequeue/orders",
        "config/topics.json",
        "timerwheel",
        "commitlog/" + "0" * 20,
        "unknown",
        "config/timercheck",
    ],
)
@pytest.mark.parametrize("kind", ["outside", "dangling"])
def test_a_repair_refuses_links_and_changes_nothing(store: Path, tmp_path: Path, name: str, kind: str) -> None:
    """The link could lead to files of the user who repairs a directory of somebody else."""
    outside = tmp_path / "outside"
    path = store / name
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("mine", "utf-8")
    path.symlink_to(outside if kind == "outside" else tmp_path / "nowhere")
    before = contents(store), contents(outside) if outside.is_dir() else outside.read_bytes()

    with pytest.raises(StoreError, match=rf"{re.escape(str(path))} is a symbolic link; a store directory may be one"):
        repair(store, tmp_path / "copy", SETTINGS)

    assert (contents(store), contents(outside) if outside.is_dir() else outside.read_bytes()) == before
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("at", ["_copy", "_delete_derived", "_replace_tables"])
@pytest.mark.parametrize("name", ["config", "consumequeue", "index"])
def test_a_link_that_appears_during_the_repair_is_not_followed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: str
) -> None:
    """Another user may exchange a folder after the check. Nothing outside the directory is read, moved or deleted."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in ("timercheck", "broken.json", "secret"):
        (outside / file).write_text("not yours", "utf-8")
    step: Callable[..., None] = getattr(repair_module, at)

    def exchanged(*arguments: object) -> None:
        if (store / name).exists():
            (store / name).rename(tmp_path / "moved")
        (store / name).symlink_to(outside)
        step(*arguments)

    monkeypatch.setattr(repair_module, at, exchanged)

    try:
        repair(store, tmp_path / "copy", SETTINGS)
    except StoreError:
        pass  # most steps notice it

    assert sorted(contents(outside)) == ["broken.json", "secret", "timercheck"]
    assert b"not yours" not in contents(tmp_path / "copy").values()


def test_the_copy_is_readable_for_its_owner_only(store: Path, tmp_path: Path) -> None:
    repair(store, tmp_path / "below" / "copy", SETTINGS)

    folders = [tmp_path / "below" / "copy", *(tmp_path / "below" / "copy").rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in folders if path.is_dir()} == {0}
    assert (tmp_path / "below" / "copy" / "lock").read_bytes() == b"lock"


@pytest.mark.parametrize("kind", ["a folder", "a dangling link", "in the directory", "the directory"])
def test_a_copy_that_cannot_be_one_is_refused(store: Path, tmp_path: Path, kind: str) -> None:
    copy = {"in the directory": store / "below" / "copy", "the directory": store}.get(kind, tmp_path / "copy")
    if kind == "a folder":
        copy.mkdir()
    elif kind == "a dangling link":
        copy.symlink_to(tmp_path / "nowhere")
    before = contents(store)

    with pytest.raises(StoreError, match="exists; give a folder|is in .*; give a folder for the copy that is not in"):
        repair(store, copy, SETTINGS)

    assert contents(store) == before
    assert not (tmp_path / "nowhere").exists()
