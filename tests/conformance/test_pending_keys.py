"""One pending message by key on Apache RocketMQ, in two steps; and what a RocketMQ that recalls nothing refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate import RocketMQTemplate
from mqtemplate.broker import Capability
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.errors import PendingKeyError, UnsupportedError
from mqtemplate.pending import PendingDecision, PendingQuery
from tests.contract.test_remote_rocketmq import REQUEST_TIMEOUT_MS, cluster

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def rocketmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBroker]:
    """A client of RocketMQ 5.5.0 that recalls messages."""
    with cluster(tmp_path_factory.mktemp("rocketmq"), "5.5.0", recallMessageEnable="true") as address:
        settings = RemoteSettings(name_servers=(address,), request_timeout_ms=REQUEST_TIMEOUT_MS)
        with RemoteBroker(settings) as broker:
            broker.create_topic("reminders", 1)
            yield broker


def pending_ids(broker: RemoteBroker, text: str) -> list[str]:
    """Return the ids of the pending messages whose pending key is *text*."""
    pending = broker.delayed.pending(PendingQuery(topic="reminders"), 1_000).messages
    return [each.msg_id for each in pending if each.pending_key == text]


def test_a_message_replaces_the_pending_one_under_its_key(rocketmq: RemoteBroker) -> None:
    """Also one of another client, which has sent it before."""
    template = RocketMQTemplate(rocketmq)

    first = template.sync_send("reminders", "a", delay="10m", pending_key="cart 17", keys="17")
    second = template.sync_send("reminders", "b", delay="10m", pending_key="cart 17")
    with RemoteBroker(rocketmq.settings) as other:
        third = RocketMQTemplate(other).sync_send("reminders", "c", delay="20m", pending_key="cart 17")

    assert Capability.PENDING_KEYS not in rocketmq.capabilities
    assert first.pending is not None
    assert first.pending.decision is PendingDecision.STORED
    assert second.replaced == (first.handle,)
    assert third.replaced == (second.handle,)
    assert pending_ids(rocketmq, "cart 17") == [third.msg_id]


def test_a_pending_message_is_kept_or_refuses_another_one(rocketmq: RemoteBroker) -> None:
    template = RocketMQTemplate(rocketmq)
    first = template.sync_send("reminders", "a", delay="10m", pending_key="cart-2")

    kept = template.sync_send("reminders", "b", delay="1h", pending_key="cart-2", on_pending="keep")
    with pytest.raises(PendingKeyError, match="cart-2") as refused:
        template.sync_send("reminders", "c", delay="1h", pending_key="cart-2", on_pending="refuse")

    assert kept.pending is not None
    assert kept.pending.decision is PendingDecision.KEPT
    assert (kept.msg_id, kept.handle) == (first.msg_id, first.handle)
    assert (refused.value.handle, refused.value.msg_id) == (first.handle, first.msg_id)
    assert pending_ids(rocketmq, "cart-2") == [first.msg_id]


def test_a_postponed_message_keeps_its_body_and_its_limit(rocketmq: RemoteBroker) -> None:
    """The limit counts from the first send, also at the second postponement."""
    template = RocketMQTemplate(rocketmq)
    options = {"pending_key": "cart-3", "on_pending": "postpone", "no_later_than": "2h"}
    first = template.sync_send("reminders", "a", delay="10m", **options)

    later = template.sync_send("reminders", "b", delay="1h", **options)
    last = template.sync_send("reminders", "c", delay="5h", **options)

    [pending] = [each for each in template.pending("reminders").messages if each.pending_key == "cart-3"]
    assert later.pending is not None
    assert later.pending.decision is PendingDecision.POSTPONED
    assert last.msg_id == later.msg_id == first.msg_id == pending.msg_id
    assert pending.deliver_ms - pending.born_timestamp <= 2 * 3_600_000
    assert pending.deliver_ms - pending.born_timestamp > 3_600_000


def test_a_strict_send_is_refused_and_stores_nothing(rocketmq: RemoteBroker) -> None:
    template = RocketMQTemplate(rocketmq)
    options = {"delay": "10m", "pending_key": "cart-5", "on_pending_strict": True}

    with pytest.raises(UnsupportedError) as refused:
        template.sync_send("reminders", "a", **options)

    assert str(refused.value) == (
        "on_pending_strict=True for pending_key='cart-5' on 'reminders': a RocketMQ cluster decides in two steps, a "
        "look-up and a send, so two messages may be pending for a while, or be delivered; leave on_pending_strict out "
        "to accept that, or use an embedded broker or a server of this library"
    )
    assert isinstance(template.async_send("reminders", "a", **options).exception(), UnsupportedError)
    assert pending_ids(rocketmq, "cart-5") == []


def test_a_level_has_no_pending_key(rocketmq: RemoteBroker) -> None:
    template = RocketMQTemplate(rocketmq)

    with pytest.raises(UnsupportedError, match="recalls only messages with a timer; pass delay= or deliver_at="):
        template.sync_send("reminders", "a", delay_level=3, pending_key="cart-4")
    with pytest.raises(UnsupportedError, match="send one message at a time, with sync_send or async_send"):
        template.send_one_way("reminders", "a", delay="10m", pending_key="cart-4")


def test_rocketmq_4_refuses_a_pending_key(tmp_path: Path) -> None:
    with cluster(tmp_path, "4.9.7") as address, RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        template = RocketMQTemplate(broker)

        with pytest.raises(UnsupportedError, match="has no timers and cancels no message"):
            template.sync_send("reminders", "a", delay="10m", pending_key="cart-4")
