"""Hostile values for every option of every verb: a call succeeds, or raises an error of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate import Message, RocketMQTemplate, SelectorType, TransactionState, transaction_listener
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.durations import duration_ms
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing import messages_in
from tests.hostile import HOSTILE, LAST, ZONES, Silent, takes_or_refuses
from tests.thirds import examples

_OPTIONS = ("delay", "deliver_at", "hash_key", "keys", "headers", "queue", "delay_level", "timeout")
_VERBS = ("sync_send", "async_send", "send_one_way", "send_in_transaction", "async_send_and_receive")


@transaction_listener()
class _Commits:
    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        return TransactionState.COMMIT

    def check_local_transaction(self, message: Message) -> TransactionState:
        return TransactionState.COMMIT


@pytest.fixture(scope="module", params=["embedded", "remote"])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQTemplate]:
    """A template with a listener for transactions, over a broker in memory, or over a server and its wire."""
    clock = VirtualClock() if request.param == "embedded" else None
    with EmbeddedBroker(clock=clock) if clock else EmbeddedBroker() as engine:
        if request.param == "embedded":
            yield from _template(engine)
            return
        with LocalCluster(engine, BrokerServerSettings()) as cluster:
            address = str(cluster.address)
            settings = RemoteSettings(name_servers=(address,), offset_path=tmp_path_factory.mktemp("offsets"))
            with RemoteBroker(settings) as broker:
                yield from _template(broker)


def _template(broker: Any) -> Iterator[RocketMQTemplate]:
    with RocketMQTemplate(broker, producer_group="shop", consumer_group="c", consumer_topic="orders") as template:
        template.add_transaction_listener(_Commits())
        template.sync_send("orders:paid", b"first")
        yield template


def _send(template: RocketMQTemplate, verb: str, destination: Any, payload: Any, options: dict[str, Any]) -> None:
    arguments = (bytes,) if verb == "async_send_and_receive" else ()
    if verb == "send_one_way" and "timeout" in options:
        return
    sent = getattr(template, verb)(destination, payload, *arguments, **options)
    if verb == "async_send":
        sent.result(10)  # a request is not awaited: no consumer replies


@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize("option", _OPTIONS)
def test_each_option_of_each_verb_takes_a_value_or_refuses_it(
    template: RocketMQTemplate, verb: str, option: str
) -> None:
    """A raw OverflowError, UnicodeEncodeError or struct.error names nothing that the caller wrote."""
    for value in HOSTILE:
        for payload in (b"x", [b"x", b"y"]):
            takes_or_refuses(lambda v=value, p=payload: _send(template, verb, "orders:paid", p, {option: v}))


@pytest.mark.parametrize("verb", _VERBS)
def test_each_destination_and_payload_is_sent_or_refused(template: RocketMQTemplate, verb: str) -> None:
    for value in HOSTILE:
        takes_or_refuses(lambda v=value: _send(template, verb, v, b"x", {}))
        if isinstance(value, str):
            takes_or_refuses(lambda v=value: _send(template, verb, f"orders:{v}", b"x", {}))
        if not isinstance(value, datetime | Silent):  # code of the caller raises while the converter runs
            takes_or_refuses(lambda v=value: _send(template, verb, "orders", v, {}))
            takes_or_refuses(lambda v=value: _send(template, verb, "orders", [b"x", v], {}))


_OTHER_CALLS: dict[str, Callable[[RocketMQTemplate, Any], object]] = {
    "cancel handle": lambda template, value: template.cancel(value),
    "cancel key": lambda template, value: template.cancel(key=value),
    "cancel topic": lambda template, value: template.cancel(key="k", topic=value),
    "reschedule handle": lambda template, value: template.reschedule(value),
    "reschedule key": lambda template, value: template.reschedule(key=value, delay="1s"),
    "reschedule delay": lambda template, value: template.reschedule(key="k", delay=value),
    "reschedule deliver_at": lambda template, value: template.reschedule(key="k", deliver_at=value),
    "pending topic": lambda template, value: template.pending(value),
    "pending key": lambda template, value: template.pending(key=value),
    "pending tag": lambda template, value: template.pending(tag=value),
    "pending before": lambda template, value: template.pending(before=value),
    "pending after": lambda template, value: template.pending(after=value),
    "pending max_count": lambda template, value: template.pending(max_count=value),
    "pending cursor": lambda template, value: template.pending(cursor=value),
    "count_pending by": lambda template, value: template.count_pending(by=value),
    "messages_by_key": lambda template, value: template.broker.reader.messages_by_key("orders", value),
    "receive max_count": lambda template, value: template.receive(bytes, value, 0),
    "receive timeout": lambda template, value: template.receive(bytes, 1, value) if not _waits(value) else None,
    "subscribe topic": lambda template, value: template.subscribe(value, bytes, "g"),
    "subscribe group": lambda template, value: template.subscribe("orders", bytes, value),
    "subscribe tags": lambda template, value: template.subscribe("orders", bytes, "g", selector_expression=value),
    "subscribe sql": lambda template, value: template.subscribe(
        "orders", bytes, "g", selector_type=SelectorType.SQL92, selector_expression=value
    ),
    "convert_and_send": lambda template, value: template.convert_and_send("orders", b"x", value),
    "transaction_listener": lambda template, value: transaction_listener(value),
}


def _waits(value: object) -> bool:
    """Return True for a long time to wait, during which no message arrives."""
    try:
        return 0 < duration_ms(value) < 2**31
    except ValueError:
        return False


@pytest.mark.parametrize("name", _OTHER_CALLS)
def test_each_argument_of_the_other_verbs_is_taken_or_refused(template: RocketMQTemplate, name: str) -> None:
    for value in HOSTILE:
        takes_or_refuses(lambda v=value: _OTHER_CALLS[name](template, v))


@settings(max_examples=examples(300), deadline=None)
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "delay": st.integers() | st.floats() | st.timedeltas() | st.text() | st.decimals(),
            "deliver_at": st.integers() | st.datetimes(timezones=st.timezones()) | st.datetimes(),
            "keys": st.text() | st.integers() | st.lists(st.text() | st.integers() | st.uuids()) | st.binary(),
            "hash_key": st.text() | st.integers() | st.uuids(),
            "headers": st.dictionaries(st.text(), st.text() | st.integers() | st.floats() | st.booleans()),
        },
    ),
    tag=st.text(st.characters(codec=None)),
)
def test_any_combination_of_options_is_sent_or_refused(options: dict[str, Any], tag: str) -> None:
    takes_or_refuses(lambda: _send(_IN_MEMORY, "sync_send", f"orders:{tag}", b"x", options))


_ENGINE = EmbeddedBroker(clock=VirtualClock())
_IN_MEMORY = RocketMQTemplate(_ENGINE)


@pytest.fixture(scope="module", autouse=True)
def _engine() -> Iterator[None]:
    with _ENGINE:
        yield


# --- texts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"deliver_at": LAST.replace(tzinfo=ZONES[2])}, {"delay": timedelta.max}])
def test_a_time_that_is_too_late_for_the_broker_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DelayError, match="the deliver time is .* from now"):
        _IN_MEMORY.sync_send("orders", b"x", **options)


def test_an_item_of_a_batch_that_is_refused_is_named_whatever_its_error_class_takes() -> None:
    """A converter may raise an error whose constructor takes other values than the text."""

    class _NoOrderError(MessageError):
        def __init__(self, *, order: int) -> None:
            super().__init__(f"order {order} is closed")
            self.order = order

    class _Converter:
        def to_body(self, payload: Any) -> tuple[bytes, str | None]:
            raise _NoOrderError(order=payload)

        def from_body(self, body: bytes, target_type: Any, properties: object) -> object:
            return body

    with pytest.raises(_NoOrderError, match="item 0 of the list: order 12 is closed") as refused:
        RocketMQTemplate(_ENGINE, converter=_Converter()).sync_send("orders", [12])

    assert refused.value.order == 12


def test_a_message_with_values_that_no_record_can_have_is_refused_before_it_is_stored() -> None:
    before = len(messages_in(_ENGINE, "orders"))
    with pytest.raises(MessageError, match="header FLAG must be a whole number of 32 bits"):
        _IN_MEMORY.sync_send("orders", Message("orders", b"x", {}, 2**31))
    with pytest.raises(MessageError, match="the body of a Message must be bytes, got str"):
        _IN_MEMORY.sync_send("orders", Message("orders", "text"))  # type: ignore[arg-type]

    assert len(messages_in(_ENGINE, "orders")) == before
