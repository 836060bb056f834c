"""RocketMQ's tools read the message trace that this library writes, on RocketMQ and on our server."""

from __future__ import annotations

import re
from queue import SimpleQueue

import pytest

from mqtemplate import Message, MQApplication, TransactionState, message_listener, transaction_listener
from tests.conformance.java_clients import Case
from tests.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180), pytest.mark.feature("message-trace")]


@pytest.mark.parametrize("trace_topic", ["", "shop-traces"])
def test_mqadmin_shows_who_sent_and_who_consumed_a_message(newest: Case, trace_topic: str) -> None:
    topic = newest.topic(f"traced{trace_topic}")
    group = newest.group(f"traced{trace_topic}")
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic, group, enable_msg_trace=True, consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    def bill(order: str) -> None:
        received.put(order)

    topics = (
        {}
        if not trace_topic
        else {
            "rocketmq.producer.customized-trace-topic": trace_topic,
            "rocketmq.consumer.customized-trace-topic": trace_topic,
        }
    )
    settings = {
        "rocketmq.name-server": newest.server.address,
        "rocketmq.producer.group": "shop",
        "rocketmq.producer.enable-msg-trace": True,
        **topics,
    }
    with MQApplication(bill, settings=settings, environment={}) as app:
        sent = app.template.sync_send(f"{topic}:paid", "tea", keys="key-7")
        assert received.get(timeout=PATIENCE_S) == "tea"

    def shown() -> str | None:
        chosen = ["-t", trace_topic] if trace_topic else []
        text = newest.tools.mqadmin("queryMsgTraceById", "-n", newest.server.address, "-i", sent.msg_id, *chosen)
        return text if group in text else None

    text = eventually(shown, "the trace can be found by the id of the message")
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert any(row[:2] == ["Pub", "shop"] and "success" in row for row in rows), text
    assert re.search(rf"Sub\s+{re.escape(group)}\b", text), text


@transaction_listener()
class Committed:
    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        return TransactionState.COMMIT

    def check_local_transaction(self, message: Message) -> TransactionState:
        return TransactionState.COMMIT


def test_mqadmin_reads_the_trace_of_a_transaction(newest: Case) -> None:
    topic = newest.topic("traced-transaction")
    settings = {
        "rocketmq.name-server": newest.server.address,
        "rocketmq.producer.group": "traced-shop",
        "rocketmq.producer.enable-msg-trace": True,
    }
    with MQApplication(Committed, settings=settings, environment={}) as app:
        sent = app.template.send_in_transaction(topic, "tea")

    def shown() -> str | None:
        text = newest.tools.mqadmin("queryMsgTraceById", "-n", newest.server.address, "-i", sent.msg_id)
        return text if "traced-shop" in text else None

    assert eventually(shown, "the trace can be found by the id of the message")
