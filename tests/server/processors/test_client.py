"""Clients and listeners of the broker's process. `tests/server/scripts/clients.script` has the rest."""

from __future__ import annotations

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.errors import ListenerError
from mqtemplate.remoting.protocol import ResponseCode, Version
from mqtemplate.selectors.tags import TagSelector
from tests.server.serving import Serving


def test_the_version_in_a_response_lets_clients_use_sql92(serving: Serving) -> None:
    """Java's consumers refuse to subscribe by SQL92 if the broker reports a version below 4.1.0."""
    assert serving.heartbeat("billing", "orders").version >= Version.V4_1_0_SNAPSHOT


def test_a_group_of_this_process_refuses_remote_members(serving: Serving) -> None:
    """The two kinds of members would not share the queues, and each message would be handled twice."""
    serving.send("orders")
    member = serving.engine.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))

    heartbeat = serving.heartbeat("billing", "orders")
    pull = serving.pull_all("orders")
    refused = serving.pull("billing", "orders")
    member.close()

    assert heartbeat.code == refused.code == ResponseCode.NO_PERMISSION
    assert "in the broker's own process" in heartbeat.remark
    assert pull.code == ResponseCode.SUCCESS
    assert serving.heartbeat("billing", "orders").code == ResponseCode.SUCCESS


def test_a_group_with_remote_members_refuses_members_of_this_process(serving: Serving) -> None:
    serving.heartbeat("billing", "orders")

    with pytest.raises(ListenerError, match="group 'billing' is read by remote clients of this broker"):
        serving.engine.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))


def test_a_group_of_this_process_and_a_remote_group_read_the_same_topic(serving: Serving) -> None:
    member = serving.engine.groups.subscribe(ConsumerSpec(group="here", subscriptions={"orders": TagSelector()}))
    serving.heartbeat("there", "orders")

    serving.send("orders", b"for both")

    assert [message.body for message in member.poll(10)] == [b"for both"]
    assert serving.pull("there", "orders").code == ResponseCode.SUCCESS


def test_a_remote_body_that_cannot_be_decompressed_does_not_stop_listeners_of_this_process(serving: Serving) -> None:
    """A client may compress with LZ4, or set the flag for a body that is not compressed."""
    member = serving.engine.groups.subscribe(ConsumerSpec(group="here", subscriptions={"orders": TagSelector()}))
    serving.send("orders", b"as lz4", sys_flag=0x101)
    serving.send("orders", b"plain")

    messages = member.poll(10)

    assert [(message.body, message.sys_flag) for message in messages] == [(b"as lz4", 0x101), (b"plain", 0)]
