"""An application writes RocketMQ's message trace: templates, listeners, topics, failures."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from mqtemplate import (
    EmbeddedBroker,
    Message,
    MQApplication,
    TransactionState,
    VirtualClock,
    message_listener,
    transaction_listener,
)
from mqtemplate.broker import Broker
from mqtemplate.calls.handling import HandlerCall, Observation
from mqtemplate.calls.message_trace import (
    ConsumeCode,
    MessageTrace,
    TraceDispatcher,
    TraceMessageType,
    TraceRecord,
    trace_messages,
    trace_record,
)
from mqtemplate.testing import Harness, messages_in
from mqtemplate.topics import TRACE_TOPIC
from tests.calls.listeners import listener_info

pytestmark = pytest.mark.feature("message-trace")

SETTINGS = {"rocketmq.name-server": "embedded:memory", "rocketmq.producer.group": "shop"}
TRACED = {**SETTINGS, "rocketmq.producer.enable-msg-trace": True}


def app_of(*components: object, settings: dict[str, object] = TRACED) -> MQApplication:
    return MQApplication(*components, settings=settings, environment={}, clock=VirtualClock())


def records_in(broker: Broker, topic: str = TRACE_TOPIC) -> list[list[str]]:
    """Return the fields of each record of a trace topic."""
    bodies = [message.body.decode() for message in messages_in(broker, topic)]
    return [record.split("\x01") for body in bodies for record in body.split("\x02") if record]


@message_listener("orders", "billing", enable_msg_trace=True)
def bill(order: str) -> None: ...


def test_a_record_is_one_line_and_is_found_by_its_keys() -> None:
    """A missing text is ``null``, as Java writes it. Source: RocketMQ ``TraceDataEncoder``."""
    record = trace_record("R", "7F01", "7 8", "Pub", 17, None, "7 8", TraceMessageType.DELAY, ConsumeCode.FAILED, True)

    assert record == TraceRecord("Pub\x0117\x01null\x017 8\x013\x014\x01true\x02", ("7F01", "7", "8"), "R")


def test_records_are_put_together_up_to_the_size_of_a_trace_message() -> None:
    records = [TraceRecord(f"{number}:" + "x" * 40_000, (f"id{number}",), "R") for number in range(5)]

    messages = trace_messages(records, lambda record: "traces")

    assert [message.keys for message in messages] == ["id0 id1", "id2 id3", "id4"]
    assert b"".join(message.body for message in messages).decode() == "".join(record.text for record in records)


def test_a_message_is_traced_from_its_producer_to_the_end_of_its_handler() -> None:
    with app_of(bill) as app:
        sent = app.template.sync_send("orders:paid", "tea", keys="7")
        Harness(app).advance("1s")

        pub, before, after = records_in(app.broker)
        assert pub[2:8] == ["DefaultRegion", "shop", "orders", sent.msg_id, "paid", "7"]
        assert pub[8:] == ["127.0.0.1:10911", "3", "0", "0", sent.offset_msg_id, "true"]
        assert before[3:] == ["billing", after[1], sent.msg_id, "0", "7"]
        assert after[2:7] == [sent.msg_id, "0", "true", "7", "0"]
        assert [message.keys for message in messages_in(app.broker, TRACE_TOPIC)] == [f"{sent.msg_id} 7"]


def test_each_verb_is_traced_with_the_kind_of_its_message() -> None:
    """Of a batch each message has a record, so that each one is found by its id. One-way sends have no result."""

    @transaction_listener()
    class Committed:
        def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
            return TransactionState.COMMIT

        def check_local_transaction(self, message: Message) -> TransactionState:
            return TransactionState.COMMIT

    with app_of(Committed) as app:
        batch = app.template.sync_send("orders", ["a", "b"])
        delayed = app.template.async_send("orders", "c", delay="1h").result(0)
        half = app.template.send_in_transaction("orders", "d")
        app.template.send_one_way("orders", "e")
        Harness(app).advance("1s")

        kinds = {record[5]: record[11] for record in records_in(app.broker) if record[0] == "Pub"}
        assert kinds == {**dict.fromkeys(batch.msg_id.split(","), "0"), delayed.msg_id: "3", half.msg_id: "1"}
        [end] = [record for record in records_in(app.broker) if record[0] == "EndTransaction"]
        assert (end[4:6], end[9:]) == (["orders", half.msg_id], ["2", half.msg_id, "COMMIT_MESSAGE", "false"])


def test_a_failed_handler_is_traced_with_its_reason_and_the_retry_with_its_number() -> None:
    @message_listener("orders", "billing", enable_msg_trace=True, retry=["5s"])
    def fail(order: str) -> None:
        raise OSError("no answer")

    with app_of(fail) as app:
        app.template.sync_send("orders", "tea")
        Harness(app, raise_handler_errors=False).advance("10s")

        records = records_in(app.broker)
        assert [record[6] for record in records if record[0] == "SubBefore"] == ["0", "1"]
        assert [(record[4], record[6]) for record in records if record[0] == "SubAfter"] == [("false", "2")] * 2


def test_a_batch_handler_is_traced_message_by_message() -> None:
    @message_listener("orders", "billing", enable_msg_trace=True)
    def bill_all(orders: list[str]) -> list[int]:
        return [1]

    with app_of(bill_all, settings=SETTINGS) as app:
        ids = app.template.sync_send("orders", ["a", "b"]).msg_id.split(",")
        Harness(app, raise_handler_errors=False).advance("1s")

        after = {record[2]: record[4] for record in records_in(app.broker) if record[0] == "SubAfter"}
        assert after == {ids[0]: "true", ids[1]: "false"}


def test_traces_go_to_the_customized_topic() -> None:
    settings = {
        **TRACED,
        "rocketmq.producer.customized-trace-topic": "sent-traces",
        "rocketmq.consumer.enable-msg-trace": True,
        "rocketmq.consumer.customized-trace-topic": "consumed-traces",
    }

    @message_listener("orders", "billing")
    def read(order: str) -> None: ...

    with app_of(read, settings=settings) as app:
        app.template.sync_send("orders", "tea")
        Harness(app).advance("1s")

        assert [record[0] for record in records_in(app.broker, "sent-traces")] == ["Pub"]
        assert [record[0] for record in records_in(app.broker, "consumed-traces")] == ["SubBefore", "SubAfter"]


def test_a_further_template_has_a_trace_of_its_own() -> None:
    settings = {
        **SETTINGS,
        "rocketmq.templates.audit.name-server": "embedded:memory",
        "rocketmq.templates.audit.enable-msg-trace": True,
    }
    with app_of(settings=settings) as app:
        from mqtemplate import RocketMQTemplate

        app.get(RocketMQTemplate, "audit").sync_send("entries", "login")
        app.template.sync_send("orders", "tea")
        Harness(app).advance("1s")

        assert [record[4] for record in records_in(app.brokers["audit"])] == ["entries"]
        assert records_in(app.broker) == []


def test_traces_are_not_traced() -> None:
    """A listener of the trace topic, such as a report, would otherwise write for ever."""

    @message_listener(TRACE_TOPIC, "report", enable_msg_trace=True)
    def report(body: bytes) -> None: ...

    with app_of(report) as app:
        app.template.sync_send("orders", "tea")
        Harness(app).advance("10s")

        assert [record[0] for record in records_in(app.broker)] == ["Pub"]


def test_the_last_records_are_sent_before_the_broker_is_closed() -> None:
    clock = VirtualClock()
    broker = EmbeddedBroker(clock=clock)
    with broker:
        with MQApplication(settings=TRACED, environment={}, clock=clock, overrides={Broker: broker}) as app:
            app.template.sync_send("orders", "tea")

        assert [record[0] for record in records_in(broker)] == ["Pub"]


def test_for_a_cloud_provider_each_region_has_a_trace_topic() -> None:
    clock = VirtualClock()
    with EmbeddedBroker(clock=clock) as broker:
        dispatcher = TraceDispatcher(broker, is_cloud=True)
        dispatcher.append(TraceRecord("a\x02", ("1",), "cn-north"))
        dispatcher.append(TraceRecord("b\x02", ("2",), "eu-west"))
        dispatcher.close()

        assert records_in(broker, "rmq_sys_TRACE_DATA_cn-north") == [["a"]]
        assert records_in(broker, "rmq_sys_TRACE_DATA_eu-west") == [["b"]]


def test_for_a_cloud_provider_the_last_record_has_no_time() -> None:
    clock = VirtualClock()
    with EmbeddedBroker(clock=clock) as broker:
        queue = broker.sends.send(Message("orders", b"x")).message_queue
        dispatcher = TraceDispatcher(broker, is_cloud=True)
        trace = MessageTrace(dispatcher, "billing", clock, Observation())
        info = listener_info("bill", clock)
        trace.handling(info)(lambda call: ())(HandlerCall(info, broker.reader.pull(queue, 0).messages))
        dispatcher.close()

        _, after = records_in(broker, "rmq_sys_TRACE_DATA_DefaultRegion")
        assert (after[0], len(after)) == ("SubAfter", 7)


def test_a_trace_topic_that_takes_nothing_fails_no_send() -> None:
    """The trace is lost, and logged; records beyond the limit are dropped."""
    clock = VirtualClock()
    broker = EmbeddedBroker(clock=clock)
    with broker:
        dispatcher = TraceDispatcher(broker, "traces")
        for number in range(2_050):
            dispatcher.append(TraceRecord("x", (f"{number}",), "R"))
    with capture_logs() as events:
        dispatcher.close()

    assert {event["event"] for event in events} == {"trace.failed", "trace.dropped"}
    assert [event["records"] for event in events if event["event"] == "trace.dropped"] == [2]
