"""The setting of a hand-over: what it opens, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate import MQApplication
from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import HandOverPhase
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.context.settings.clients import remote_settings, settings_of_old_broker
from mqtemplate.errors import ConfigurationError, StoreLockedError, UnsupportedError
from mqtemplate.handover import HandOverBroker, HandOverOptions, MoverSettings
from mqtemplate.listener.declaration.decorator import SPARK_LISTENER_ATTRIBUTE
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.testing import Harness
from mqtemplate_starter_embedded import EmbeddedAutoConfiguration
from mqtemplate_starter_rocketmq import RocketMQAutoConfiguration
from tests.context.loading import Load, Refusal

PENDING = PendingQuery()
STARTERS = (EmbeddedAutoConfiguration, RocketMQAutoConfiguration)


def moving(folder: Path, **settings: object) -> MQApplication:
    """Return an application that moves from one folder to another one, both below *folder*."""
    keys = {
        "rocketmq.name-server": f"embedded:{folder}/new",
        "mqtemplate.hand-over.from": f"embedded:{folder}/old",
        **settings,
    }
    return MQApplication(settings=keys, environment={}, clock=VirtualClock(), starters=STARTERS)


# --- what it opens --------------------------------------------------------------------------------


def test_one_setting_makes_both_brokers_the_broker_of_the_application(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "old", clock=VirtualClock()) as before:
        before.sends.send(Message("orders", b"pending", {Property.TIMER_DELAY_MS: "3600000"}))

    with moving(tmp_path) as app:
        broker = app.get(Broker)  # type: ignore[type-abstract]
        assert isinstance(broker, HandOverBroker)
        assert broker is app.broker
        assert broker.old.path == tmp_path / "old"
        assert broker.new.path == tmp_path / "new"
        state = broker.old.hand_over.state()
        assert state is not None
        assert (state.phase, state.target) == (HandOverPhase.RUNNING, f"embedded:{tmp_path}/new")
        Harness(app).advance("10s")

    with EmbeddedBroker(tmp_path / "new", clock=VirtualClock()) as after:
        assert [message.topic for message in after.delayed.pending(PENDING).messages] == ["orders"]


def test_without_the_setting_nothing_changes(tmp_path: Path) -> None:
    settings = {"rocketmq.name-server": f"embedded:{tmp_path}/new"}
    with MQApplication(settings=settings, environment={}, clock=VirtualClock(), starters=STARTERS) as app:
        assert isinstance(app.broker, EmbeddedBroker)


def test_its_keys_reach_the_hand_over(tmp_path: Path) -> None:
    keys = {"rate": 50, "max-early-ms": "2s", "orderly-waits-for": "pending", "allow-other-queue-count": "true"}
    app = moving(tmp_path, **{f"mqtemplate.hand-over.{name}": value for name, value in keys.items()})
    with app:
        broker = app.broker
        assert isinstance(broker, HandOverBroker)
        assert broker.options == HandOverOptions(
            target=f"embedded:{tmp_path}/new",
            origin=f"mqtemplate.hand-over.from: embedded:{tmp_path}/old",
            mover=MoverSettings(rate=50, max_early_ms=2_000),
            orderly_waits_for_pending=True,
            allow_other_queue_count=True,
        )


def test_an_application_can_be_checked_without_opening_a_broker(tmp_path: Path) -> None:
    moving(tmp_path).check()

    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_the_store_path_is_left_by_the_word_embedded(load: Load, tmp_path: Path) -> None:
    """The key of the old folder may stay where it is."""
    settings = load("""
        rocketmq:
          name-server: mq1:9876
        mqtemplate:
          broker:
            store-path: ./shop
          hand-over:
            from: embedded
    """)

    assert settings_of_old_broker(settings).store_path == Path.cwd() / "shop"


def test_the_old_server_has_an_account_of_its_own(load: Load) -> None:
    """The secrets of the new cluster are not sent to the old server."""
    settings = load("""
        rocketmq:
          name-server: mq1:9876
          producer: {group: shop, access-key: of-the-new, secret-key: new-secret}
        mqtemplate:
          hand-over: {from: "old:9876", access-key: of-the-old, secret-key: old-secret}
    """)

    old, new = remote_settings(settings_of_old_broker(settings)), remote_settings(settings)

    assert old.name_servers == ("old:9876",)
    assert old.credentials is not None
    assert old.credentials.access_key == "of-the-old"
    assert new.credentials is not None
    assert new.credentials.access_key == "of-the-new"


def test_a_copied_folder_is_copied_until_it_is_empty(load: Load) -> None:
    settings = load("""
        rocketmq: {name-server: "mq1:9876"}
        mqtemplate:
          copy: {to: "file:///mnt/copy"}
          hand-over: {from: "embedded:/var/lib/shop"}
    """)

    assert settings.copied_path is None
    assert settings_of_old_broker(settings).copied_path == Path("/var/lib/shop")


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name_server", "old", "problem"),
    [
        (None, "embedded:./data", "and no new broker is given; set rocketmq.name-server or rocketmq.endpoints"),
        ("embedded:./data", "embedded:./data", "both are one broker; set rocketmq.name-server"),
        ("mq1:9876;mq2:9876", "mq2:9876", "both are one broker"),
        ("embedded:memory", "embedded:./data", "what moved there would end with this process"),
        ("mq1:9876", "embedded:memory", "a store that ends with its process, so nothing can be left there"),
        ("mq1:9876", "grpc://proxy:8081", "a proxy of RocketMQ: pending messages move from this library's brokers"),
        ("mq1:9876", "redis", "allowed are 'embedded', 'embedded:<folder>', and 'host:port' of a server of this"),
    ],
)
def test_a_hand_over_that_cannot_be_is_refused(
    refusal: Refusal, name_server: str | None, old: str, problem: str
) -> None:
    new = "" if name_server is None else f'rocketmq: {{name-server: "{name_server}"}}'
    text = refusal(f'{new}\nmqtemplate:\n  hand-over:\n    from: "{old}"\n')

    assert f"from is '{old}'" in text or f"from: is '{old}'" in text, text
    assert "application.yml:" in text
    assert problem in text


def test_half_an_account_is_refused(refusal: Refusal) -> None:
    text = refusal("""
        rocketmq: {name-server: "mq1:9876"}
        mqtemplate:
          hand-over: {from: "old:9876", access-key: only}
    """)

    assert "access-key" in text
    assert "secret-key" in text


def test_a_folder_in_use_is_refused_with_the_setting(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "old", clock=VirtualClock()), pytest.raises(StoreLockedError) as refused:
        moving(tmp_path).start()

    assert f"(mqtemplate.hand-over.from: embedded:{tmp_path}/old) does not start" in str(refused.value)


def test_an_excluded_starter_of_the_old_broker_is_named(tmp_path: Path) -> None:
    keys = {"rocketmq.name-server": "mq1:9876", "mqtemplate.hand-over.from": f"embedded:{tmp_path}/old"}
    app = MQApplication(settings=keys, environment={}, clock=VirtualClock(), starters=[RocketMQAutoConfiguration])

    with pytest.raises(ConfigurationError) as refused:
        app.start()

    assert f"mqtemplate.hand-over.from is 'embedded:{tmp_path}/old', and no starter creates that broker" in str(
        refused.value
    )


def test_a_spark_listener_would_miss_the_old_broker_and_is_refused(tmp_path: Path) -> None:
    def batches(rows: object) -> None: ...

    setattr(batches, SPARK_LISTENER_ATTRIBUTE, object())
    keys = {"rocketmq.name-server": "mq1:9876", "mqtemplate.hand-over.from": f"embedded:{tmp_path}/old"}
    app = MQApplication(batches, settings=keys, environment={}, clock=VirtualClock(), starters=STARTERS)

    with pytest.raises(UnsupportedError) as refused:
        app.start()

    assert "batches is a Spark listener, which reads one broker, and mqtemplate.hand-over.from is set" in str(
        refused.value
    )
    assert "Let the listener finish at the old broker first" in str(refused.value)
