"""The delay levels of a server, changed by a client."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.errors import ConfigurationError, DelayError, UnsupportedError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from tests.brokers.remote.clients import client, remote, server
from tests.brokers.remote.scripted_cluster import ScriptedBroker

_HOUR_MS = 3_600_000


def _at_level(level: str) -> Message:
    return Message("orders", b"x", {Property.DELAY: level})


def test_a_client_changes_the_delay_levels_of_the_server(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        broker.change_delay_levels("1h  2h")

        before_ms = broker.clock.now_ms()
        broker.sends.send(Message("orders", b"x", {Property.DELAY: "2"}))
        [pending] = broker.delayed.pending(PendingQuery(topic="orders")).messages

        assert cluster.engine.engine.levels.text == "1h 2h"
        assert pending.deliver_ms >= before_ms + 2 * _HOUR_MS


def test_administrators_get_the_levels_that_the_server_uses(tmp_path: Path) -> None:
    """Not those of the settings here, which are RocketMQ's; also after another client has changed them."""
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        cluster.engine.change_delay_levels("1h 2h")
        first = broker.admin().delay_levels_ms()
        broker.change_delay_levels("3h")

        assert first == (_HOUR_MS, 2 * _HOUR_MS)
        assert broker.admin().delay_levels_ms() == (3 * _HOUR_MS,)


def test_brokers_that_refuse_their_settings_have_unknown_levels() -> None:
    """Access control may forbid the request."""
    with ScriptedBroker() as scripted, remote(scripted) as broker:
        scripted.refuse(RequestCode.GET_BROKER_CONFIG, ResponseCode.NO_PERMISSION)

        assert broker.admin().delay_levels_ms() is None
        assert scripted.count(RequestCode.GET_BROKER_CONFIG) == 1


# --- a level that the table does not have -----------------------------------------------------------


def test_a_level_that_the_table_of_the_client_does_not_have_is_refused_before_a_request_is_sent() -> None:
    with ScriptedBroker() as scripted, remote(scripted, message_delay_level="1s 2s") as broker:
        scripted.topic("orders")
        for sends in (
            lambda: broker.sends.send(_at_level("3")),
            lambda: broker.sends.send_async([_at_level("3")]).result(0),
            lambda: broker.sends.send_batch([Message("orders", b"x"), _at_level("3")]),
            lambda: broker.sends.send_one_way(_at_level("3")),
            lambda: broker.sends.send_half(_at_level("3"), "shop"),
        ):
            with pytest.raises(
                DelayError, match=r"the delay level must be 0\.\.2 \(1=1s 2=2s\), got 3; .*clamp-delay-level"
            ):
                sends()

        assert scripted.count(RequestCode.SEND_MESSAGE_V2) == scripted.count(RequestCode.SEND_BATCH_MESSAGE) == 0


def test_with_rocketmqs_rule_a_client_sends_a_level_that_its_table_does_not_have() -> None:
    """The broker limits it; the client sends what the application gave."""
    with ScriptedBroker() as scripted, remote(scripted, clamp_delay_level=True) as broker:
        scripted.topic("orders")

        broker.sends.send(_at_level("99"))

        assert scripted.count(RequestCode.SEND_MESSAGE_V2) == 1


def test_a_server_with_rocketmqs_rule_stores_the_highest_level(tmp_path: Path) -> None:
    with (
        server(clamp_delay_level=True) as cluster,
        client(cluster.address, tmp_path, clamp_delay_level=True) as broker,
    ):
        broker.sends.send(_at_level("99"))

        [pending] = broker.delayed.pending(PendingQuery(topic="orders")).messages
        assert pending.delay_level == 18


def test_a_changed_table_is_the_table_of_the_client(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        broker.change_delay_levels("1h 2h")

        assert list(broker.delay_levels_ms) == [_HOUR_MS, 2 * _HOUR_MS]
        with pytest.raises(DelayError, match=r"the delay level must be 0\.\.2 \(1=1h 2=2h\), got 3"):
            broker.sends.send(_at_level("3"))


def test_an_invalid_table_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        before = cluster.engine.engine.levels.text

        with pytest.raises(ConfigurationError, match="soon"):
            broker.change_delay_levels("1s soon")

        assert cluster.engine.engine.levels.text == before


def test_a_rocketmq_broker_gets_no_request_to_change_its_levels() -> None:
    """It would accept the request, and go on with its old table."""
    with ScriptedBroker() as scripted, remote(scripted) as broker:
        with pytest.raises(UnsupportedError, match="set messageDelayLevel in its settings and restart it"):
            broker.change_delay_levels("1s 2s")

        assert scripted.count(RequestCode.UPDATE_BROKER_CONFIG) == 0
