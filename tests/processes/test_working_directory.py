"""Relative paths: each is resolved where it is given first, so a later ``os.chdir`` has no effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.clock import SystemClock
from mqtemplate.context.application import MQApplication
from mqtemplate.context.settings.clients import remote_settings
from mqtemplate.context.settings.source import load_settings
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.operations.access import StoreAccess
from mqtemplate.operations.audit import AuditLog
from mqtemplate.pending import PendingQuery
from mqtemplate.processes import absolute_path
from mqtemplate.remoting.identity import ClientTls
from mqtemplate.remoting.settings import ServerTls
from mqtemplate.spark.location.folder import StoreFolder
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.store.files.folder_store_files import SnapshotStoreFiles
from mqtemplate.template import RocketMQTemplate

QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first working directory. ``../other`` is the one after it."""
    (tmp_path / "other").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def other(home: Path) -> Iterator[Path]:
    yield home.parent / "other"
    assert list((home.parent / "other").iterdir()) == [], "nothing was written to the later working directory"


def test_messages_stay_in_the_folder_in_which_the_broker_was_created(home: Path, other: Path) -> None:
    """The commit log gets new files, the tables are written, and the timers are created after the change."""
    small = EmbeddedSettings(mapped_file_size_commit_log=1 << 20)
    with EmbeddedBroker("./data", small) as broker:
        os.chdir(other)
        for number in range(8):
            broker.sends.send(Message("orders", b"%d" % number * (400 << 10)), QUEUE)
        broker.sends.send(Message("orders", b"later", {"TIMER_DELAY_MS": "3600000"}))
        broker.groups.commit_offset("billing", QUEUE, 3)

    with EmbeddedBroker(home / "data", small) as broker:
        found = [message.body[:1] for at in range(8) for message in broker.reader.pull(QUEUE, at, max_count=1).messages]
        assert found == [b"%d" % number for number in range(8)]
        assert broker.delayed.count_pending(PendingQuery(), 86_400_000).total == 1
        assert broker.groups.committed_offset("billing", QUEUE) == 3


@pytest.mark.parametrize("key", ["rocketmq.name-server", "mqtemplate.broker.store-path"])
def test_an_application_has_the_folder_of_the_time_when_its_settings_were_read(
    home: Path, other: Path, key: str
) -> None:
    value = "embedded:./data" if key == "rocketmq.name-server" else "./data"
    settings = load_settings(arguments={"rocketmq.name-server": "embedded", key: value})
    os.chdir(other)

    with MQApplication(settings=settings) as app:
        app.get(RocketMQTemplate).sync_send("orders", "x")

    assert settings.store_path == home / "data"
    assert (home / "data" / "commitlog").is_dir()


def test_each_kind_of_path_is_kept_from_the_root(home: Path, other: Path) -> None:
    with EmbeddedBroker("data"):
        pass  # creates the folder
    kept = {
        "broker": EmbeddedBroker("data").path,
        "snapshot": SnapshotStoreFiles(Path("data")).root,
        "administration": StoreAccess(Path("data")).path,
        "broadcasting offsets": RemoteSettings(name_servers=("a:1",), offset_path=Path("data")).offset_path,
        "certificate of a client": ClientTls(trust_cert_path="data").trust_cert_path,
        "certificate of a server": ServerTls(cert_path="data", key_path="").cert_path,
        "audit log": AuditLog(Path("data", "audit"), SystemClock()).path,
        "location for Spark": BrokerLocation.of_options({"store": "data"}).store,
        "source of Spark": SourceOptions.parse({"store": "data", "topic": "orders"}, streaming=False).location.store,
        "folder for Spark": StoreFolder("data").store,
    }
    os.chdir(other)

    assert {name: str(path).removesuffix("/audit") for name, path in kept.items()} == dict.fromkeys(
        kept, str(home / "data")
    )


def test_the_offset_folder_of_an_application_is_that_of_the_time_when_its_settings_were_read(
    home: Path, other: Path
) -> None:
    keys = {"rocketmq.name-server": "127.0.0.1:1", "mqtemplate.cluster.offset-path": "offsets"}
    settings = load_settings(arguments=keys)
    os.chdir(other)

    assert remote_settings(settings).offset_path == home / "offsets"


def test_a_home_directory_in_a_path_is_that_of_the_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))

    settings = load_settings(arguments={"rocketmq.name-server": "embedded:~/data"})
    unknown = load_settings(arguments={"rocketmq.name-server": "embedded:~nobody-of-this-name/data"})

    assert settings.store_path == home / "data"
    with pytest.raises(
        ConfigurationError, match=r"needed for rocketmq.name-server = ~nobody-of-this-name/data; set HOME"
    ):
        _ = unknown.store_path


def test_a_deleted_working_directory_is_an_error_for_relative_paths_only(home: Path) -> None:
    absolute = home.parent / "elsewhere"
    home.rmdir()

    for use in (lambda: absolute_path("./data"), lambda: EmbeddedBroker("./data")):
        with pytest.raises(ConfigurationError) as raised:
            use()
        assert str(raised.value) == (
            "the relative path './data' has no meaning: the working directory of this process cannot be found (No such "
            "file or directory); give an absolute path, or start in a directory that exists"
        )
    with EmbeddedBroker(absolute) as broker:
        broker.sends.send(Message("orders", b"x"))
    os.chdir(home.parent)


def test_a_certificate_is_found_after_a_change_of_the_directory(home: Path, other: Path) -> None:
    """The context is created with the first connection, which may be later."""
    from mqtemplate.remoting.settings import client_context

    (home / "ca.pem").write_text("no certificate", "ascii")
    tls = ClientTls(trust_cert_path="ca.pem")
    os.chdir(other)

    with pytest.raises(ConfigurationError) as raised:
        client_context(tls)

    assert str(home / "ca.pem") in str(raised.value)
