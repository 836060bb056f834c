"""The embedded starter: the broker that it creates, and the keys that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate import EmbeddedBroker, MQApplication, VirtualClock
from mqtemplate.errors import DependencyError, MessageError, UnsupportedError
from mqtemplate_starter_embedded import EmbeddedAutoConfiguration


def app_with(*components: object, **keys: object) -> MQApplication:
    return MQApplication(
        *components, settings=keys, environment={}, clock=VirtualClock(), starters=[EmbeddedAutoConfiguration]
    )


def test_the_store_of_embedded_memory_has_no_directory() -> None:
    with app_with(**{"rocketmq.name-server": "embedded:memory"}) as app:
        assert app.get(EmbeddedBroker).path is None


def test_the_files_are_in_the_directory_of_the_name_server_key(tmp_path: Path) -> None:
    with app_with(**{"rocketmq.name-server": f"embedded:{tmp_path / 'data'}"}) as app:
        app.template.sync_send("orders", "x")
        assert app.get(EmbeddedBroker).path == tmp_path / "data"

    assert list((tmp_path / "data").iterdir())


def test_the_default_store_directory_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with app_with():
        assert (tmp_path / "mqtemplate-store").is_dir()


def test_the_broker_has_the_settings_of_the_section() -> None:
    keys = {"rocketmq.name-server": "embedded:memory", "mqtemplate.broker.timer-roll-window-slot": 1_000}

    with app_with(**keys) as app:
        assert app.get(EmbeddedBroker).settings is app.settings.mqtemplate.broker
        assert app.get(EmbeddedBroker).settings.timer_roll_window_slot == 1_000


def test_a_body_above_the_producer_s_limit_is_refused() -> None:
    with app_with(**{"rocketmq.name-server": "embedded:memory", "rocketmq.producer.max-message-size": 100}) as app:
        app.template.sync_send("orders", b"x" * 100)
        with pytest.raises(MessageError, match="100"):
            app.template.sync_send("orders", b"x" * 101)


def test_the_broker_s_limit_can_be_set_alone() -> None:
    """The default of the producer's limit neither contradicts it nor lowers it."""
    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.broker.max-message-size": "10"}

    with MQApplication(settings=settings, clock=VirtualClock()) as app:
        app.template.sync_send("orders", bytes(10))
        with pytest.raises(MessageError, match="has 11 bytes, allowed are 10"):
            app.template.sync_send("orders", bytes(11))


def test_the_starter_backs_off_for_a_broker_of_the_application() -> None:
    """Then it checks no keys: the application's broker may support them."""
    broker = EmbeddedBroker(clock=VirtualClock())

    with app_with(broker, **{"rocketmq.name-server": "127.0.0.1:9876"}) as app:
        assert app.broker is broker


def test_the_starter_can_be_switched_off() -> None:
    with pytest.raises(DependencyError, match="there is no Broker"):
        app_with(**{"mqtemplate.embedded.enabled": False}).start()


def test_the_starter_does_not_act_for_the_address_of_a_cluster() -> None:
    app = app_with(**{"rocketmq.name-server": "127.0.0.1:9876"})

    with pytest.raises(DependencyError, match="there is no Broker"):
        app.start()

    [outcome] = app.context.conditions
    assert (outcome.starter, outcome.reason) == ("embedded", "rocketmq.name-server names a cluster")


def test_a_key_is_refused_before_the_store_directory_is_created(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        app_with(**{"mqtemplate.broker.store-path": str(tmp_path / "s"), "rocketmq.producer.tls-enable": "on"}).start()

    assert not (tmp_path / "s").exists()
