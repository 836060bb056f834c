"""The starter for clusters: the settings that the keys set, and the keys that it refuses."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import (
    ConsumeMode,
    EmbeddedBroker,
    EmbeddedSettings,
    MessageExt,
    MQApplication,
    RemoteBroker,
    VirtualClock,
    message_listener,
)
from mqtemplate.broker import ConsumeFromWhere
from mqtemplate.context import AppSettings, load_settings
from mqtemplate.errors import RemoteConnectError, UnsupportedError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import RemotingServerSettings, ServerTls, TlsMode
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate_starter_rocketmq import RocketMQAutoConfiguration
from tests.remoting.certificates import Certificates, has_openssl
from tests.waiting import PATIENCE_S

FIRST = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
CLUSTER = {"rocketmq.name-server": "127.0.0.1:1;127.0.0.1:2"}


def settings_with(**keys: object) -> AppSettings:
    return load_settings(environment={}, arguments={**CLUSTER, **keys})


def app_with(*components: object, **keys: object) -> MQApplication:
    settings = {**CLUSTER, **keys}
    return MQApplication(*components, settings=settings, environment={}, starters=[RocketMQAutoConfiguration])


def test_the_error_for_an_unreachable_cluster_contains_its_addresses() -> None:
    with pytest.raises(RemoteConnectError, match=r"no name server answers.*127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        app_with().start()


def test_a_key_that_no_cluster_supports_is_refused() -> None:
    key = "rocketmq.pull-consumer.enable-msg-trace"

    with pytest.raises(UnsupportedError, match=f"{key} cannot be honoured: .*receive writes no traces"):
        app_with(**{key: True}).start()


def test_the_starter_backs_off_for_a_broker_of_the_application() -> None:
    broker = EmbeddedBroker(clock=VirtualClock())

    with app_with(broker) as app:
        assert app.broker is broker


def test_the_starter_does_not_act_for_an_embedded_broker() -> None:
    reason = RocketMQAutoConfiguration().condition(settings_with(**{"rocketmq.name-server": "embedded:memory"}))

    assert reason == "rocketmq.name-server names no cluster, and rocketmq.endpoints no proxy"


def test_the_starter_creates_a_remote_broker() -> None:
    settings = settings_with()
    factory = RocketMQAutoConfiguration().broker_factory(settings)
    assert factory is not None
    broker = factory(settings, VirtualClock())

    assert isinstance(broker, RemoteBroker)
    assert broker.settings.name_servers == ("127.0.0.1:1", "127.0.0.1:2")


# --- whole applications over our own server -------------------------------------------------------


class Handled:
    """Messages that the listeners handled, by key and in order."""

    def __init__(self) -> None:
        self.by_key: dict[str, list[int]] = {}
        self.is_complete = threading.Event()
        self._lock = threading.Lock()

    def add(self, key: str, number: int, expected: int) -> None:
        with self._lock:
            self.by_key.setdefault(key, []).append(number)
            if sum(map(len, self.by_key.values())) >= expected:
                self.is_complete.set()


ANYWHERE = HostAddress("127.0.0.1", 0)
KEYS = ("a", "b", "c", "d", "e")
EACH = 8


def server(**settings: Any) -> LocalCluster:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    return LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE), **settings)


def application(cluster: LocalCluster, *components: object, **keys: object) -> MQApplication:
    """Return an application with the installed starters."""
    settings = {"rocketmq.name-server": str(cluster.address), **keys}
    return MQApplication(*components, settings=settings, environment={})


def test_orderly_listeners_of_two_applications_keep_the_order_of_each_key() -> None:
    handled = Handled()

    def listener() -> object:
        @message_listener("orders", "billing", consume_mode=ConsumeMode.ORDERLY, consume_from_where=FIRST)
        class Ordered:
            def on_message(self, order: dict[str, Any]) -> None:
                handled.add(order["key"], order["number"], len(KEYS) * EACH)

        return Ordered

    with server() as cluster, application(cluster, listener()) as one, application(cluster, listener()):
        for number in range(EACH):
            for key in KEYS:
                one.template.sync_send("orders", {"key": key, "number": number}, hash_key=key)
        assert handled.is_complete.wait(PATIENCE_S)

    assert sorted(handled.by_key) == sorted(KEYS)
    for numbers in handled.by_key.values():
        # A rebalance may reassign a queue. Its new owner repeats uncommitted messages, but never out of order.
        assert list(dict.fromkeys(numbers)) == list(range(EACH))


def test_a_failed_request_is_retried_and_then_gets_its_reply() -> None:
    seen: list[int] = []

    @message_listener("orders", "billing", consume_from_where=FIRST, delay_level_when_next_consume=1)
    class Failing:
        def on_message(self, message: MessageExt) -> str:
            seen.append(message.reconsume_times)
            if not message.reconsume_times:
                raise ValueError("the first time fails")
            return f"{message.body.decode()} at last"

    with server() as cluster, application(cluster, Failing) as app:
        reply = app.template.send_and_receive("orders", "paid", reply_type=str, timeout="30s")

    assert (reply, seen) == ("paid at last", [0, 1])


@pytest.mark.skipif(not has_openssl(), reason="there is no openssl to make certificates with")
def test_an_application_connects_over_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.issue("server", "IP:127.0.0.1")
    tls = ServerTls(cert_path=str(cert), key_path=str(key), mode=TlsMode.ENFORCING)
    keys = {
        "rocketmq.producer.tls-enable": True,
        "mqtemplate.cluster.tls-trust-cert-path": str(certificates.authority),
    }

    with server(remoting=RemotingServerSettings(tls=tls)) as cluster:
        with application(cluster, **keys) as app:
            assert app.template.sync_send("orders", "secret").queue_offset == 0
        with pytest.raises(RemoteConnectError, match="no name server answers"):
            application(cluster).start()
