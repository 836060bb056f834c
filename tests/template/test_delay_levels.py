"""A delay level that the table of the broker does not have: it is refused, or limited as RocketMQ does by a setting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqtemplate import Message, RocketMQTemplate, TransactionState, transaction_listener
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DelayError
from mqtemplate.pending import PendingQuery
from mqtemplate.testing import Harness, messages_in


@transaction_listener()
class _Commits:
    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        return TransactionState.COMMIT

    def check_local_transaction(self, message: Message) -> TransactionState:
        return TransactionState.COMMIT


SENDS: dict[str, Callable[[RocketMQTemplate], object]] = {
    "sync": lambda template: template.sync_send("orders", "x", delay_level=99),
    "async": lambda template: template.async_send("orders", "x", delay_level=99).result(0),
    "batch": lambda template: template.sync_send("orders", ["x", "y"], delay_level=99),
    "one-way": lambda template: template.send_one_way("orders", "x", delay_level=99),
    "transaction": lambda template: template.send_in_transaction("orders", "x", delay_level=99),
    "header": lambda template: template.sync_send("orders", "x", headers={"DELAY": 99}),
    "Spring's name": lambda template: template.syncSend("orders", "x", 3_000, 99),
}


def _template(broker: EmbeddedBroker) -> RocketMQTemplate:
    template = RocketMQTemplate(broker, producer_group="shop")
    template.add_transaction_listener(_Commits())
    return template


@pytest.mark.parametrize("kind", SENDS)
def test_it_is_refused_by_default_and_nothing_is_stored(kind: str) -> None:
    """99 became two hours without a word."""
    with EmbeddedBroker(clock=VirtualClock()) as broker, _template(broker) as template:
        with pytest.raises(DelayError) as refused:
            SENDS[kind](template)

        assert "the delay level must be 0..18 (1=1s 2=5s 3=10s" in str(refused.value)
        assert "got 99; 0 means no delay, for other delays pass delay= or deliver_at=" in str(refused.value)
        assert "mqtemplate.broker.clamp-delay-level=true" in str(refused.value)
        assert broker.delayed.pending(PendingQuery()).messages == ()
        assert messages_in(broker, "orders") == []


@pytest.mark.parametrize("kind", SENDS)
def test_by_the_setting_it_is_the_highest_level(kind: str) -> None:
    with EmbeddedBroker(None, EmbeddedSettings(clamp_delay_level=True), VirtualClock()) as broker:
        with _template(broker) as template:
            SENDS[kind](template)

        assert {each.delay_level for each in broker.delayed.pending(PendingQuery(topic="orders")).messages} == {18}


def test_a_half_message_of_a_longer_table_is_committed_after_a_change_to_a_shorter_one() -> None:
    """Its producer cannot take it back: it is delivered with the highest level."""
    settings = EmbeddedSettings(message_delay_level="1s 10s 1m 2h")
    with EmbeddedBroker(None, settings, VirtualClock()) as broker:
        broker.create_topic("orders", 1)
        half = broker.sends.send_half(Message("orders", b"x", {"DELAY": "4"}), "shop")
        broker.change_delay_levels("1s 10s")

        broker.transactions.end_transaction(half, TransactionState.COMMIT)

        [pending] = broker.delayed.pending(PendingQuery(topic="orders")).messages
        assert pending.delay_level == 2
        Harness(broker).advance("10s")
        assert [message.body for message in messages_in(broker, "orders")] == [b"x"]
