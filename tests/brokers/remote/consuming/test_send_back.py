"""Messages sent back to a broker: one request to our server, copies where RocketMQ does not have the fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.broker import Capability, Consumer
from mqtemplate.brokers import RemoteBroker
from mqtemplate.message import MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.bodies.own_requests import HeartbeatResponseHeader
from mqtemplate.remoting.protocol.headers.message import ConsumerSendMsgBackRequestHeader, SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.messages import decode_properties_text
from tests.brokers.remote.clients import client, join, message_ext
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        broker.topic("orders", queues=1)
        broker.topic("%RETRY%billing", queues=1)
        ScriptedGroups(broker)
        broker.script(RequestCode.CONSUMER_SEND_MSG_BACK, RemotingCommand.response)
        yield broker


def announce(cluster: ScriptedBroker, *capabilities: Capability) -> None:
    """Respond to heartbeats as our server does."""
    header = HeartbeatResponseHeader(capabilities=",".join(each.name for each in capabilities), warnings=None)
    cluster.script(RequestCode.HEART_BEAT, lambda request: request.response(header=header))


@pytest.fixture
def broker(cluster: ScriptedBroker, tmp_path: Path) -> Iterator[RemoteBroker]:
    with client(cluster.address, tmp_path) as broker:
        yield broker


def sent_back(cluster: ScriptedBroker) -> list[ConsumerSendMsgBackRequestHeader]:
    code = RequestCode.CONSUMER_SEND_MSG_BACK
    return [request.header(ConsumerSendMsgBackRequestHeader) for request in cluster.seen if request.code == code]


def copies(cluster: ScriptedBroker) -> list[SendMessageRequestHeaderV2]:
    code = RequestCode.SEND_MESSAGE_V2
    return [request.header(SendMessageRequestHeaderV2) for request in cluster.seen if request.code == code]


def message(broker_name: str = "broker-a") -> MessageExt:
    return message_ext(body=b"x" * 100_000, broker_name=broker_name, physical_offset=4711)


@pytest.fixture
def member(cluster: ScriptedBroker, broker: RemoteBroker) -> Consumer:
    return join(broker, "orders")


class TestOurServer:
    @pytest.fixture(autouse=True)
    def capabilities(self, cluster: ScriptedBroker) -> None:
        announce(cluster, Capability.RETRY_DELAY)

    def test_a_retry_with_an_exact_delay_is_one_small_request(self, cluster: ScriptedBroker, member: Consumer) -> None:
        """The server has the body already."""
        member.send_back(message(), delay_ms=1_234, properties={"first_failed_at": "now"})

        [header] = sent_back(cluster)
        assert (header.offset, header.delay_ms, copies(cluster)) == (4711, 1_234, [])
        assert decode_properties_text(header.properties) == {"first_failed_at": "now"}

    def test_a_dead_letter_is_one_small_request_with_its_cause(self, cluster: ScriptedBroker, member: Consumer) -> None:
        member.send_back(message(), -1, delay_ms=1_234, properties={"dead_letter_message": "no such customer"})

        [header] = sent_back(cluster)
        assert (header.delay_level, header.delay_ms, copies(cluster)) == (-1, None, [])
        assert decode_properties_text(header.properties) == {"dead_letter_message": "no such customer"}


def test_rocketmq_gets_copies_with_the_properties(cluster: ScriptedBroker, member: Consumer) -> None:
    """Its brokers would ignore our fields: the retry would come too early or too late, and without the properties."""
    member.send_back(message(), delay_ms=1_234, properties={"first_failed_at": "now"})
    member.send_back(message(), -1, properties={"dead_letter_message": "no such customer"})

    assert sent_back(cluster) == []
    retry, dead = (decode_properties_text(copy.properties) for copy in copies(cluster))
    assert (retry["TIMER_DELAY_MS"], retry["first_failed_at"]) == ("1234", "now")
    assert dead["dead_letter_message"] == "no such customer"


def test_rocketmq_moves_messages_with_a_level_itself(cluster: ScriptedBroker, member: Consumer) -> None:
    member.send_back(message(), 2, properties={"first_failed_at": "now"})

    [header] = sent_back(cluster)
    assert (header.delay_level, header.delay_ms, header.properties, copies(cluster)) == (2, None, None, [])


@pytest.mark.parametrize("delay", [{"delay_level": 2}, {"delay_ms": 1_234}])
def test_a_message_of_a_removed_broker_is_sent_as_a_copy(
    cluster: ScriptedBroker, member: Consumer, delay: dict[str, int]
) -> None:
    member.send_back(message("broker-z"), **delay)  # type: ignore[arg-type]

    assert sent_back(cluster) == []
    assert len(copies(cluster)) == 1
