"""The embedded starter: which broker it makes, and which keys it refuses because nothing could honour them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mqtemplate import EmbeddedBroker, EmbeddedSettings, MQApplication, VirtualClock
from mqtemplate.context.settings.mqtemplate import BrokerSettings
from mqtemplate.errors import DependencyError, MessageError, UnsupportedError
from mqtemplate_starter_embedded import EmbeddedAutoConfiguration


def app_with(*components: object, **keys: object) -> MQApplication:
    return MQApplication(
        *components, settings=keys, environment={}, clock=VirtualClock(), starters=[EmbeddedAutoConfiguration]
    )


def test_embedded_memory_keeps_no_files() -> None:
    with app_with(**{"rocketmq.name-server": "embedded:memory"}) as app:
        assert app.get(EmbeddedBroker).path is None


def test_embedded_with_a_folder_keeps_its_files_there(tmp_path: Path) -> None:
    with app_with(**{"rocketmq.name-server": f"embedded:{tmp_path / 'data'}"}) as app:
        app.template.sync_send("orders", "x")
        assert app.get(EmbeddedBroker).path == tmp_path / "data"

    assert list((tmp_path / "data").iterdir())


def test_without_any_key_the_folder_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with app_with():
        assert (tmp_path / "mqtemplate-store").is_dir()


def test_every_setting_of_the_broker_is_a_key_with_the_same_default() -> None:
    """The keys repeat the broker's settings so that each can be documented and checked; they must not drift apart."""
    of_the_broker = dataclasses.asdict(EmbeddedSettings())
    keys = dict(BrokerSettings())
    del keys["store_path"]

    assert keys == {**of_the_broker, "listen_host": EmbeddedSettings().listen_host}


def test_a_body_above_the_producer_s_limit_is_refused() -> None:
    with app_with(**{"rocketmq.name-server": "embedded:memory", "rocketmq.producer.max-message-size": 100}) as app:
        app.template.sync_send("orders", b"x" * 100)
        with pytest.raises(MessageError, match="100"):
            app.template.sync_send("orders", b"x" * 101)


def test_the_broker_s_limit_can_be_set_by_itself() -> None:
    """A producer's limit that nobody set must neither contradict it nor lower it."""
    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.broker.max-message-size": "10"}

    with MQApplication(settings=settings, clock=VirtualClock()) as app:
        app.template.sync_send("orders", bytes(10))
        with pytest.raises(MessageError, match="has 11 bytes, allowed are 10"):
            app.template.sync_send("orders", bytes(11))


def test_the_starter_backs_off_for_a_broker_of_the_application() -> None:
    """Then it checks no key either: what the broker can do is its owner's knowledge."""
    broker = EmbeddedBroker(clock=VirtualClock())

    with app_with(broker, **{"rocketmq.name-server": "127.0.0.1:9876"}) as app:
        assert app.broker is broker


def test_the_starter_can_be_switched_off() -> None:
    with pytest.raises(DependencyError, match="there is no Broker"):
        app_with(**{"mqtemplate.embedded.enabled": False}).start()


def test_the_address_of_a_cluster_is_left_to_another_starter() -> None:
    app = app_with(**{"rocketmq.name-server": "127.0.0.1:9876"})

    with pytest.raises(DependencyError, match="there is no Broker"):
        app.start()

    [outcome] = app.context.conditions
    assert (outcome.starter, outcome.reason) == ("embedded", "rocketmq.name-server names a cluster")


@pytest.mark.parametrize("section", ["producer", "consumer", "pull-consumer"])
@pytest.mark.parametrize(
    ("keys", "named", "reason"),
    [
        ({"access-key": "hunter1", "secret-key": "hunter2"}, "access-key", "knows no users"),
        ({"tls-enable": True}, "tls-enable", "nothing travels over a network"),
        ({"enable-msg-trace": True}, "enable-msg-trace", "no trace topic"),
        ({"customized-trace-topic": "t"}, "customized-trace-topic", "no trace topic"),
        ({"namespace": "n"}, "namespace", "put the prefix into topic and group"),
        ({"namespace-v2": "n"}, "namespace-v2", "put the prefix into topic and group"),
    ],
)
def test_a_key_that_the_embedded_broker_cannot_honour_is_refused(
    section: str, keys: dict[str, object], named: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        app_with(**{f"rocketmq.{section}.{key}": value for key, value in keys.items()}).start()

    assert str(refused.value).startswith(f"argument settings: rocketmq.{section}.{named} cannot be honoured: ")
    assert reason in str(refused.value)
    assert "hunter" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rocketmq.access-channel", "cloud", "no cloud provider"),
        ("rocketmq.pull-consumer.instance-name", "mine", "one reader"),
    ],
)
def test_other_things_that_need_a_cluster_are_refused(key: str, value: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{key} cannot be honoured: .*{reason}.*; remove the key"):
        app_with(**{key: value}).start()


def test_a_refused_key_leaves_nothing_behind(tmp_path: Path) -> None:
    """It is refused before the folder is made."""
    with pytest.raises(UnsupportedError):
        app_with(**{"mqtemplate.broker.store-path": str(tmp_path / "s"), "rocketmq.producer.tls-enable": "on"}).start()

    assert not (tmp_path / "s").exists()
