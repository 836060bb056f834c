"""``MQApplication.check``: everything is built, and nothing is started."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mqtemplate.context import MQApplication, service
from mqtemplate.errors import DependencyError, ListenerError
from mqtemplate.listener import message_listener
from mqtemplate.scheduling import scheduled
from mqtemplate.template import RocketMQTemplate

steps: list[str] = []


@pytest.fixture(autouse=True)
def no_steps() -> None:
    steps.clear()


@service
class Database:
    def __init__(self, template: RocketMQTemplate) -> None:
        steps.append("built")

    def on_start(self) -> None:
        steps.append("started")

    def close(self) -> None:
        steps.append("closed")


@message_listener(topic="orders", consumer_group="billing")
class Billing:
    def __init__(self, database: Database) -> None: ...

    def on_message(self, order: str) -> None: ...


@scheduled(cron="0 9 * * *")
def report() -> None: ...


@pytest.mark.parametrize("name_server", ["embedded:./store", "127.0.0.1:1"])
def test_objects_are_built_and_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name_server: str
) -> None:
    """No server listens on the address, and no directory is created."""
    monkeypatch.chdir(tmp_path)
    app = MQApplication(Database, Billing, report, settings={"rocketmq.name-server": name_server}, environment={})

    app.check()
    app.stop()

    assert steps == ["built"]
    assert list(tmp_path.iterdir()) == []
    assert not app.is_ready.is_set()


def test_an_application_that_was_checked_does_not_start() -> None:
    app = MQApplication(settings={"rocketmq.name-server": "embedded:memory"}, environment={})
    app.check()

    with pytest.raises(DependencyError, match="an application is started once; create another MQApplication"):
        app.start()
    with pytest.raises(DependencyError, match="an application is checked before its start; create another"):
        app.check()


def test_a_missing_dependency_is_found() -> None:
    app = MQApplication(Billing, settings={"rocketmq.name-server": "embedded:memory"}, environment={})

    with pytest.raises(DependencyError, match="database"):
        app.check()


def test_listeners_that_contradict_each_other_are_found() -> None:
    @message_listener(topic="payments", consumer_group="billing")
    def pay(order: str) -> None: ...

    app = MQApplication(Database, Billing, pay, settings={"rocketmq.name-server": "embedded:memory"}, environment={})

    with pytest.raises(ListenerError, match="are both of group 'billing' and have different subscriptions"):
        app.check()


def test_clusters_of_templates_and_listeners_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server listens on the addresses, no directory is created, and no thread runs."""
    monkeypatch.chdir(tmp_path)
    threads = set(threading.enumerate())

    @message_listener(topic="entries", consumer_group="audit", broker="audit", enable_msg_trace=True)
    def note(entry: str) -> None: ...

    @message_listener(topic="entries", consumer_group="archive", name_server="127.0.0.1:2")
    def keep(entry: str) -> None: ...

    settings = {
        "rocketmq.name-server": "embedded:./store",
        "rocketmq.producer.enable-msg-trace": True,
        "rocketmq.templates.audit.name-server": "127.0.0.1:1",
        "rocketmq.templates.archive.name-server": "embedded:./archive",
    }
    MQApplication(note, keep, settings=settings, environment={}).check()

    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) == threads
