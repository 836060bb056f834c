"""The delay levels of a server, changed by a client."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.errors import ConfigurationError, UnsupportedError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from tests.brokers.remote.clients import client, remote, server
from tests.brokers.remote.scripted_cluster import ScriptedBroker

_HOUR_MS = 3_600_000


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
