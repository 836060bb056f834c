"""Outbox: a message is sent if, and only if, the transaction of the business change is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from mqtemplate import EmbeddedBroker, Message, MessageQueue, MQApplication, RocketMQTemplate, SendResult
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, DestinationError, MessageError, SendError
from mqtemplate.outbox import AsyncSQLAlchemyOutbox, SQLAlchemyOutbox
from mqtemplate.pending import PendingQuery
from mqtemplate.testing.harness import Harness
from mqtemplate.testing.recording import messages_in
from tests.kit import Kit
from tests.waiting import eventually

pytestmark = pytest.mark.feature("X15")
INSERT = sa.text("INSERT INTO orders (id, state) VALUES (:id, 'new')")


@pytest.fixture
def outbox(engine: sa.Engine, mqtemplate_template: RocketMQTemplate, mqtemplate_harness: Harness) -> SQLAlchemyOutbox:
    """Outbox whose relay the harness steps."""
    outbox = SQLAlchemyOutbox(engine, mqtemplate_template)
    mqtemplate_harness.add(outbox.relay)
    return outbox


def bodies(broker: EmbeddedBroker, topic: str = "orders") -> list[bytes]:
    return [message.body for message in messages_in(broker, topic)]


def left(engine: sa.Engine) -> Sequence[tuple[str, str | None]]:
    """Return topic and error of the rows that are left."""
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT topic, error FROM mqtemplate_outbox ORDER BY id"))
        return [tuple(row) for row in rows]


def order(engine: sa.Engine, outbox: SQLAlchemyOutbox, number: int) -> str:
    """Store an order and its message in one transaction; return the message id."""
    with Session(engine) as session, session.begin():
        session.execute(INSERT, {"id": number})
        return outbox.send(session, "orders:new", f"order {number}", keys=str(number))


# --- transactions --------------------------------------------------------------------------------


def test_messages_of_committed_transactions_are_sent_in_order(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    ids = [order(engine, outbox, number) for number in range(3)]
    assert bodies(kit.broker) == []

    kit.harness.run_until_idle()

    sent = sorted(messages_in(kit.broker, "orders"), key=lambda message: message.physical_offset)
    assert [(message.body, message.msg_id, message.tags, message.keys) for message in sent] == [
        (f"order {number}".encode(), ids[number], "new", str(number)) for number in range(3)
    ]
    assert left(engine) == []


def test_nothing_is_sent_for_a_transaction_that_is_rolled_back(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    with Session(engine) as session:
        outbox.send(session, "orders", "never")
        session.rollback()

    kit.harness.run_until_idle()

    assert (bodies(kit.broker), left(engine)) == ([], [])


def test_a_connection_works_like_a_session(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    with engine.begin() as connection:
        outbox.send(connection, "orders", ["one", "two"])

    kit.harness.run_until_idle()

    assert sorted(bodies(kit.broker)) == [b"one", b"two"]


def test_a_delay_counts_from_the_call(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, mqtemplate_broker: EmbeddedBroker, mqtemplate_clock: VirtualClock
) -> None:
    with Session(engine) as session, session.begin():
        outbox.send(session, "orders", "late", delay=timedelta(hours=1))
    mqtemplate_clock.move_ms(600_000)
    harness = Harness(mqtemplate_broker, outbox.relay)

    harness.advance("50m")
    assert bodies(mqtemplate_broker) == [b"late"]


def test_messages_of_one_key_go_to_one_queue(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    with Session(engine) as session, session.begin():
        for number in range(5):
            outbox.send(session, "orders", f"{number}", hash_key="customer 7")

    kit.harness.run_until_idle()

    stored = messages_in(kit.broker, "orders")
    assert len({message.queue_id for message in stored}) == 1
    assert [message.properties["__SHARDINGKEY"] for message in stored] == ["customer 7"] * 5


def test_an_invalid_message_is_refused_in_the_transaction(engine: sa.Engine, outbox: SQLAlchemyOutbox) -> None:
    with Session(engine) as session, pytest.raises(DestinationError):
        outbox.send(session, "no topic!", "x")
    with Session(engine) as session, pytest.raises(MessageError, match="has no option 'queue'; a hash_key selects"):
        outbox.send(session, "orders", "x", queue=MessageQueue("orders", "broker-a", 0))


# --- faults --------------------------------------------------------------------------------------


class Unwilling(EmbeddedBroker):
    """Broker that refuses messages, or stores one and then reports an error, as a network may."""

    refuses: type[Exception] | None = None
    answers = True

    def start(self) -> None:
        super().start()
        self._store = self.sends.send
        self.sends.send = self._send  # type: ignore[method-assign]

    def _send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        if self.refuses is not None:
            raise self.refuses("no")
        result = self._store(message, queue, timeout_ms)
        if not self.answers:
            raise SendError("the answer was lost")
        return result


@pytest.fixture
def mqtemplate_broker(mqtemplate_clock: VirtualClock) -> object:
    with Unwilling(None, clock=mqtemplate_clock) as broker:
        yield broker


def test_rows_wait_while_the_broker_is_down(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    kit.broker.refuses = SendError
    order(engine, outbox, 1)
    order(engine, outbox, 2)
    kit.harness.advance("1m")
    assert (bodies(kit.broker), len(left(engine))) == ([], 2)

    kit.broker.refuses = None
    kit.harness.advance("1s")

    assert (sorted(bodies(kit.broker)), left(engine)) == ([b"order 1", b"order 2"], [])


def test_a_message_is_sent_again_with_the_same_id_if_its_answer_is_lost(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """As if the relay had been killed before it deleted the row. An inbox recognises the repeat."""
    kit.broker.answers = False
    msg_id = order(engine, outbox, 1)
    kit.harness.run_until_idle()

    kit.broker.answers = True
    kit.harness.advance("1s")

    assert [message.msg_id for message in messages_in(kit.broker, "orders")] == [msg_id, msg_id]


def test_a_message_that_the_broker_refuses_for_good_stays_with_the_reason(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """It does not block the messages after it."""
    kit.broker.refuses = MessageError
    order(engine, outbox, 1)
    kit.harness.run_until_idle()

    kit.broker.refuses = None
    order(engine, outbox, 2)
    kit.harness.run_until_idle()

    assert (bodies(kit.broker), left(engine)) == ([b"order 2"], [("orders", "no")])


def test_of_two_relays_one_sends_and_the_other_takes_over(
    engine: sa.Engine,
    mqtemplate_template: RocketMQTemplate,
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_clock: VirtualClock,
) -> None:
    """The lease of a process that died ends after ten seconds."""
    first, second = (SQLAlchemyOutbox(engine, mqtemplate_template) for _ in range(2))
    order(engine, first, 1)
    first.relay.step()
    order(engine, first, 2)

    second.relay.step()
    assert bodies(mqtemplate_broker) == [b"order 1"]
    mqtemplate_clock.move_ms(10_001)
    second.relay.step()

    assert sorted(bodies(mqtemplate_broker)) == [b"order 1", b"order 2"]


def test_a_lease_of_a_clock_that_was_ahead_stops_the_relay_for_no_years(
    engine: sa.Engine,
    mqtemplate_template: RocketMQTemplate,
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_clock: VirtualClock,
) -> None:
    """The process that took it died."""
    first, second = (SQLAlchemyOutbox(engine, mqtemplate_template) for _ in range(2))
    order(engine, first, 1)
    mqtemplate_clock.move_ms(10 * 365 * 86_400_000)
    first.relay.step()
    mqtemplate_clock.move_ms(-10 * 365 * 86_400_000)
    order(engine, second, 2)

    second.relay.step()

    assert sorted(bodies(mqtemplate_broker)) == [b"order 1", b"order 2"]


def test_a_relay_that_stops_lets_another_one_continue_at_once(
    engine: sa.Engine, mqtemplate_template: RocketMQTemplate, mqtemplate_broker: EmbeddedBroker
) -> None:
    first, second = (SQLAlchemyOutbox(engine, mqtemplate_template) for _ in range(2))
    order(engine, first, 1)
    first.relay.step()
    order(engine, first, 2)

    first.on_stop()
    second.relay.step()

    assert sorted(bodies(mqtemplate_broker)) == [b"order 1", b"order 2"]


def test_a_relay_stops_also_while_its_database_is_down(
    engine: sa.Engine, mqtemplate_template: RocketMQTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = SQLAlchemyOutbox(engine, mqtemplate_template)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE mqtemplate_outbox_lease"))

    outbox.on_stop()

    assert "outbox.lease_kept" in caplog.text


def test_a_lease_that_is_no_duration_is_refused(engine: sa.Engine, mqtemplate_template: RocketMQTemplate) -> None:
    with pytest.raises(ConfigurationError, match="lease must be a duration"):
        SQLAlchemyOutbox(engine, mqtemplate_template, lease="long")
    with pytest.raises(ConfigurationError, match="lease must be one second or longer, got '500ms'"):
        SQLAlchemyOutbox(engine, mqtemplate_template, lease="500ms")


def test_a_database_that_is_not_supported_is_refused(mqtemplate_template: RocketMQTemplate) -> None:
    engine = sa.create_mock_engine("mysql+pymysql://", lambda *_: None)

    with pytest.raises(ConfigurationError, match="outbox and inbox need sqlite or postgresql, got mysql"):
        SQLAlchemyOutbox(engine, mqtemplate_template)  # type: ignore[arg-type]


# --- in an application, with threads -------------------------------------------------------------


def test_an_application_starts_and_stops_the_relay(engine: sa.Engine) -> None:
    """On the real clock: the commit wakes the relay, and the listener gets the message."""
    from mqtemplate import message_listener

    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(text: str) -> None:
        received.append(text)

    def make_outbox(template: RocketMQTemplate) -> SQLAlchemyOutbox:
        return SQLAlchemyOutbox(engine, template)

    from mqtemplate import service

    settings = {"rocketmq.name-server": "embedded:memory"}
    with MQApplication(bill, service(make_outbox), settings=settings, environment={}) as app:
        order(engine, app.get(SQLAlchemyOutbox), 1)
        eventually(lambda: received == ["order 1"], "the listener has the message")

    assert left(engine) == []


def async_url(url: str) -> str:
    return url.replace("sqlite://", "sqlite+aiosqlite://")


def test_an_async_outbox_relays_on_the_loop(url: str) -> None:
    async def main() -> list[bytes]:
        engine = create_async_engine(async_url(url))
        with EmbeddedBroker(None) as broker, RocketMQTemplate(broker, producer_group="shop") as template:
            outbox = AsyncSQLAlchemyOutbox(engine, template)
            await outbox.on_start()
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(INSERT, {"id": 1})
                await outbox.send(session, "orders", "committed")
            async with AsyncSession(engine) as session:
                await outbox.send(session, "orders", "rolled back")
                await session.rollback()
            await asyncio.to_thread(eventually, lambda: bodies(broker), "the relay has sent it")
            await outbox.on_stop()
            await engine.dispose()
            return bodies(broker)

    assert asyncio.run(main()) == [b"committed"]


def test_an_async_outbox_is_refused_on_a_virtual_clock(url: str, mqtemplate_template: RocketMQTemplate) -> None:
    with pytest.raises(ConfigurationError, match="test with SQLAlchemyOutbox"):
        AsyncSQLAlchemyOutbox(create_async_engine(async_url(url)), mqtemplate_template)


# --- pending keys ----------------------------------------------------------------------------------


def test_the_broker_decides_about_a_pending_key_when_the_row_is_relayed(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    with Session(engine) as session, session.begin():
        outbox.send(session, "carts", "2 books", delay="15m", pending_key="cart-17")
        last = outbox.send(session, "carts", "3 books", delay="15m", pending_key="cart-17")

    kit.harness.run_until_idle()

    [pending] = kit.broker.delayed.pending(PendingQuery(topic="carts")).messages
    assert (pending.msg_id, pending.pending_key) == (last, "cart-17")
    kit.harness.advance("15m")
    assert bodies(kit.broker, "carts") == [b"3 books"]


def test_a_row_whose_pending_key_is_taken_stays_with_the_reason(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """It does not block the rows after it."""
    with Session(engine) as session, session.begin():
        for text in ("2 books", "3 books"):
            outbox.send(session, "carts", text, delay="15m", pending_key="cart-17", on_pending="refuse")
        outbox.send(session, "orders", "after them")

    kit.harness.run_until_idle()

    assert bodies(kit.broker) == [b"after them"]
    [(topic, error)] = left(engine)
    assert topic == "carts"
    assert error is not None
    assert "with pending_key 'cart-17' is pending" in error


def test_a_row_that_is_relayed_again_does_not_refuse_itself(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """The answer to the first relay was lost."""
    kit.broker.answers = False
    with Session(engine) as session, session.begin():
        outbox.send(session, "carts", "2 books", delay="15m", pending_key="cart-17", on_pending="refuse")
    kit.harness.run_until_idle()

    kit.broker.answers = True
    kit.harness.advance("1s")

    assert left(engine) == []
    assert kit.broker.delayed.count_pending(PendingQuery(topic="carts")).total == 1
