"""Cancel and reschedule of messages that an outbox has, with the transaction and in order with the sends."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from mqtemplate import EmbeddedBroker, Message, MessageQueue, RocketMQTemplate, SendResult, message_listener
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import (
    BrokerError,
    ConfigurationError,
    DelayError,
    EventLoopBlockedError,
    MessageError,
    SendError,
)
from mqtemplate.outbox import AsyncSQLAlchemyOutbox, OutboxSession, SQLAlchemyOutbox, outbox_tables
from mqtemplate.pending import ScheduleChange, ScheduleChangeStatus
from mqtemplate.testing.harness import Harness
from mqtemplate.testing.recording import messages_in
from tests.kit import Kit
from tests.waiting import eventually

pytestmark = pytest.mark.feature("X15")

CANCELLED, RESCHEDULED = ScheduleChangeStatus.CANCELLED, ScheduleChangeStatus.RESCHEDULED
UNKNOWN = ScheduleChangeStatus.UNKNOWN
HOUR_MS = 3_600_000


class FaultyBroker(EmbeddedBroker):
    """Broker that can be down, lose its answers, or call a function before it stores a message."""

    is_down = False
    answers = True

    def start(self) -> None:
        super().start()
        if self.sends.send == self._send:
            return  # an application starts it again
        self.before_send: Callable[[Message], object] = lambda _message: None
        self._store, self._cancel, self._move = self.sends.send, self.delayed.cancel, self.delayed.reschedule
        self.sends.send = self._send  # type: ignore[method-assign]
        self.delayed.cancel = lambda *args, **options: self._reached(self._cancel, *args, **options)  # type: ignore[method-assign]
        self.delayed.reschedule = lambda *args, **options: self._reached(self._move, *args, **options)  # type: ignore[method-assign]

    def _send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        if self.is_down:
            raise SendError("the broker is down")
        self.before_send(message)
        result = self._store(message, queue, timeout_ms)
        if not self.answers:
            raise SendError("the answer was lost")
        return result

    def _reached(self, verb: Callable[..., ScheduleChange], *args: Any, **options: Any) -> ScheduleChange:
        if self.is_down:
            raise BrokerError("the broker is down")
        return verb(*args, **options)


@pytest.fixture
def mqtemplate_broker(mqtemplate_clock: VirtualClock) -> Iterator[FaultyBroker]:
    with FaultyBroker(None, clock=mqtemplate_clock) as broker:
        yield broker


@pytest.fixture
def outbox(engine: sa.Engine, mqtemplate_template: RocketMQTemplate, mqtemplate_harness: Harness) -> SQLAlchemyOutbox:
    """Outbox whose relay the harness steps."""
    outbox = SQLAlchemyOutbox(engine, mqtemplate_template)
    mqtemplate_harness.add(outbox.relay)
    return outbox


def delivered(kit: Kit, topic: str = "orders") -> list[str]:
    return [message.body.decode() for message in messages_in(kit.broker, topic)]


def changes_left(engine: sa.Engine) -> list[tuple[str, str | None]]:
    """Return key and error of the changes in the table."""
    with engine.connect() as connection:
        rows = connection.execute(
            sa.text("SELECT change_key, error FROM mqtemplate_outbox WHERE change_key IS NOT NULL ORDER BY id")
        )
        return [(key, error) for key, error in rows]


def rows_left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        count: int = connection.execute(sa.text("SELECT count(*) FROM mqtemplate_outbox")).scalar_one()
        return count


def pass_down_time(kit: Kit, hours: int) -> None:
    """Let hours pass in one step. The relay looks at each second of an outage, which would take this test minutes."""
    kit.harness.run_until_idle()
    kit.broker.clock.move_ms(hours * HOUR_MS)
    kit.harness.run_until_idle()


def send(engine: sa.Engine, outbox: SQLAlchemyOutbox, body: str, **options: Any) -> str:
    with Session(engine) as session, session.begin():
        return outbox.send(session, "orders", body, **{"delay": "2h", "keys": "k"} | options)


def cancel(engine: sa.Engine, outbox: SQLAlchemyOutbox, key: str = "k", topic: str | None = None) -> None:
    with Session(engine) as session, session.begin():
        outbox.cancel(session, key=key, topic=topic)


def move(engine: sa.Engine, outbox: SQLAlchemyOutbox, key: str = "k", **options: Any) -> None:
    with Session(engine) as session, session.begin():
        outbox.reschedule(session, key=key, **options)


# --- cancel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_relayed", [False, True], ids=["in the outbox", "at the broker"])
def test_a_cancelled_message_is_never_delivered(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, is_relayed: bool
) -> None:
    send(engine, outbox, "reminder")
    if is_relayed:
        kit.harness.run_until_idle()

    cancel(engine, outbox)
    kit.harness.advance("3h")

    assert (delivered(kit), rows_left(engine)) == ([], 0)


def test_a_cancel_that_is_rolled_back_changes_nothing(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    send(engine, outbox, "reminder")
    with Session(engine) as session:
        outbox.cancel(session, key="k")
        outbox.reschedule(session, key="k", delay="9h")
        session.rollback()

    kit.harness.advance("3h")

    assert delivered(kit) == ["reminder"]


def test_the_message_of_a_later_send_with_the_key_is_delivered(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """All in one transaction, and while the broker is down: the order of the calls decides."""
    kit.broker.is_down = True
    with Session(engine) as session, session.begin():
        for body in ("first", "second"):
            outbox.send(session, "orders", body, delay="2h", keys="k")
            outbox.cancel(session, key="k")
        outbox.send(session, "orders", "last", delay="2h", keys="k")
    kit.harness.run_until_idle()
    kit.broker.is_down = False

    kit.harness.advance("3h")

    assert (delivered(kit), rows_left(engine)) == (["last"], 0)


def test_a_message_that_fell_due_while_the_broker_was_down_is_cancelled(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    kit.broker.is_down = True
    send(engine, outbox, "reminder")
    pass_down_time(kit, 1)
    cancel(engine, outbox)
    pass_down_time(kit, 3)
    kit.broker.is_down = False

    kit.harness.advance("1m")

    assert (delivered(kit), rows_left(engine)) == ([], 0)


def test_a_key_means_delayed_messages_only_and_an_id_any_message(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """An event with the key of a reminder would be delivered by now, if the broker were not down."""
    kit.broker.is_down = True
    send(engine, outbox, "event", delay=None)
    msg_id = send(engine, outbox, "by its id", delay=None)
    cancel(engine, outbox, "k")
    cancel(engine, outbox, msg_id)
    kit.broker.is_down = False

    kit.harness.advance("3h")

    assert (delivered(kit), rows_left(engine)) == (["event"], 0)


def test_a_topic_restricts_a_change(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    send(engine, outbox, "reminder")
    with Session(engine) as session, session.begin():
        outbox.send(session, "mails", "mail", delay="2h", keys="k")
    cancel(engine, outbox, topic="mails")

    kit.harness.advance("3h")

    assert (delivered(kit), delivered(kit, "mails")) == (["reminder"], [])


# --- reschedule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_relayed", [False, True], ids=["in the outbox", "at the broker"])
@pytest.mark.parametrize("level", [0, 17], ids=["timer", "level"])
def test_a_moved_message_is_delivered_at_its_last_time(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, is_relayed: bool, level: int
) -> None:
    with Session(engine) as session, session.begin():
        outbox.send(session, "orders", "reminder", level, delay=None if level else "1h", keys="k")
    if is_relayed:
        kit.harness.run_until_idle()
    move(engine, outbox, delay="30m")
    move(engine, outbox, deliver_at=datetime.fromtimestamp(kit.broker.clock.now_ms() // 1_000 + 10_800, UTC))

    kit.harness.advance("2h 59m")
    assert delivered(kit) == []
    kit.harness.advance("1m")

    assert (delivered(kit), rows_left(engine)) == (["reminder"], 0)


def test_a_move_to_a_time_that_passed_before_the_next_move_has_no_effect(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """The message is in the broker, which is down meanwhile. Executed one by one, the first move would deliver it."""
    send(engine, outbox, "reminder", delay="9h")
    kit.harness.run_until_idle()
    kit.broker.is_down = True
    move(engine, outbox, delay="1h")
    move(engine, outbox, delay="5h")
    pass_down_time(kit, 2)
    kit.broker.is_down = False

    kit.harness.advance("2h 59m")
    assert delivered(kit) == []
    kit.harness.advance("1m")

    assert delivered(kit) == ["reminder"]


def test_a_message_without_a_new_time_is_delivered_now(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    send(engine, outbox, "reminder")
    move(engine, outbox)

    kit.harness.advance("1s")

    assert delivered(kit) == ["reminder"]


def test_a_cancelled_message_cannot_be_moved(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    send(engine, outbox, "reminder")
    cancel(engine, outbox)
    move(engine, outbox, delay="1h")

    kit.harness.advance("3h")

    assert (delivered(kit), rows_left(engine)) == ([], 0)


def test_changes_are_found_far_from_their_messages(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    """The relay reads 100 rows at a time."""
    kit.broker.is_down = True
    with Session(engine) as session, session.begin():
        for number in range(240):
            outbox.send(session, "orders", str(number), delay="1h", keys=["all", f"order-{number}"])
        for number in range(240):
            if number % 2:
                outbox.cancel(session, key=f"order-{number}")
            else:
                outbox.reschedule(session, key=f"order-{number}", delay="4h")
    pass_down_time(kit, 2)
    kit.broker.is_down = False

    kit.harness.advance("1h")
    assert (delivered(kit), rows_left(engine)) == ([], 0)
    kit.harness.advance("1h")

    assert sorted(map(int, delivered(kit))) == list(range(0, 240, 2))


@pytest.mark.parametrize("by", ["outbox", "template"])
def test_forty_five_reminders_are_moved_while_the_broker_is_down(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, by: str
) -> None:
    kit.broker.is_down = True
    for number in range(45):
        send(engine, outbox, str(number), keys=f"order-{number}")
    for number in range(45):
        if by == "outbox":
            move(engine, outbox, f"order-{number}", delay="5h")
        else:
            change = kit.template.reschedule(key=f"order-{number}", delay="5h")
            assert (change.status, change.count) == (RESCHEDULED, 1)
    pass_down_time(kit, 3)
    kit.broker.is_down = False

    kit.harness.advance("1h 59m")
    assert delivered(kit) == []
    kit.harness.advance("1m")

    assert (sorted(map(int, delivered(kit))), rows_left(engine)) == (list(range(45)), 0)


# --- the relay at the same time, and faults ------------------------------------------------------


@pytest.mark.parametrize("by", ["outbox", "template"])
def test_a_message_that_is_being_relayed_is_cancelled_at_the_broker(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, by: str
) -> None:
    """The relay has read the row. The cancel commits before the broker stores the message."""
    statuses = []

    def change(_message: Message) -> None:
        if by == "outbox":
            cancel(engine, outbox)
        else:
            statuses.append(kit.template.cancel(key="k").status)

    kit.broker.before_send = change
    send(engine, outbox, "reminder")
    kit.harness.run_until_idle()

    kit.harness.advance("3h")

    assert (delivered(kit), rows_left(engine), set(statuses)) == ([], 0, {CANCELLED} if by == "template" else set())


@pytest.mark.parametrize("new_time", [None, "5h"], ids=["cancel", "reschedule"])
def test_a_message_whose_answer_was_lost_is_changed_at_the_broker(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, new_time: str | None
) -> None:
    """Its row is still there, and the broker has it. A moved message may come twice, with one id, but not early."""
    kit.broker.answers = False
    msg_id = send(engine, outbox, "reminder")
    kit.harness.run_until_idle()
    if new_time is None:
        cancel(engine, outbox)
    else:
        move(engine, outbox, delay=new_time)
    kit.broker.answers = True

    kit.harness.advance("4h 59m")
    assert (delivered(kit), rows_left(engine)) == ([], 0)
    kit.harness.advance("1m")

    ids = {message.msg_id for message in messages_in(kit.broker, "orders")}
    assert ids == (set() if new_time is None else {msg_id})


def test_a_later_message_with_the_key_waits_until_the_row_of_the_change_is_deleted(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """Else the relay of another process could repeat the change, and hit the later message."""
    left: dict[bytes, list[tuple[str, str | None]]] = {}

    def look(message: Message) -> None:
        left[message.body] = changes_left(engine)

    with Session(engine) as session, session.begin():
        outbox.cancel(session, key="k")
        outbox.send(session, "orders", "other", delay="1h", keys="other")
        outbox.send(session, "orders", "later", delay="1h", keys="k")
    kit.broker.before_send = look
    kit.harness.run_until_idle()

    assert left == {b"other": [("k", None)], b"later": []}


def test_a_relay_that_dies_repeats_its_changes_without_harm(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, mqtemplate_template: RocketMQTemplate
) -> None:
    class Killed(BaseException):
        pass

    def die(message: Message) -> None:
        if message.body == b"other":
            raise Killed

    with Session(engine) as session, session.begin():
        outbox.send(session, "orders", "first", delay="1h", keys="k")
        outbox.cancel(session, key="k")
        outbox.send(session, "orders", "other", delay="1h", keys="other")
        outbox.send(session, "orders", "second", delay="1h", keys="k")
    kit.broker.before_send = die
    with pytest.raises(Killed):
        outbox.relay.step()
    kit.broker.before_send = lambda _message: None
    kit.harness.add(SQLAlchemyOutbox(engine, mqtemplate_template).relay)

    kit.harness.advance("2h")

    assert (sorted(delivered(kit)), rows_left(engine)) == (["other", "second"], 0)


def test_a_change_that_the_broker_refuses_stays_with_the_reason_and_the_message_keeps_its_time(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    send(engine, outbox, "reminder")
    move(engine, outbox, delay="41d")

    kit.harness.advance("2h")

    ((key, error),) = changes_left(engine)
    assert (delivered(kit), key) == (["reminder"], "k")
    assert error is not None
    assert "delay" in error
    assert "outbox.change_refused" in caplog.text


def test_the_answer_of_the_broker_is_in_the_log(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    """A change that comes too late is an event of level info, the others are of level debug."""
    send(engine, outbox, "reminder")
    kit.harness.advance("2h")
    send(engine, outbox, "next", keys="n")
    kit.harness.run_until_idle()

    with caplog.at_level(logging.DEBUG, "mqtemplate.outbox"):
        cancel(engine, outbox, "k")
        cancel(engine, outbox, "n")
        kit.harness.run_until_idle()

    events = [(record.levelname, record.getMessage()) for record in caplog.records]
    late, found = [(level, text) for level, text in events if "outbox.change_relayed" in text]
    assert (late[0], found[0]) == ("INFO", "DEBUG")
    assert "already delivered" in late[1]
    assert "cancelled" in found[1]


# --- changes by the template ---------------------------------------------------------------------


def test_the_template_cancels_what_the_outbox_has(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    send(engine, outbox, "reminder")

    assert kit.template.cancel(key="other").status is UNKNOWN
    assert kit.template.cancel(key="k", topic="mails").status is UNKNOWN
    change = kit.template.cancel(key="k")
    again = kit.template.cancel(key="k")
    moved = kit.template.reschedule(key="k", delay="1h")
    kit.harness.advance("3h")

    assert (change.status, change.count) == (CANCELLED, 1)
    assert [(each.status, each.count) for each in (again, moved)] == [(CANCELLED, 0)] * 2
    assert (delivered(kit), rows_left(engine)) == ([], 0)


def test_a_call_of_the_template_changes_outbox_and_broker(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    kit.template.sync_send("orders", "at the broker", delay="1h", keys="k")
    send(engine, outbox, "in the outbox")

    change = kit.template.reschedule(key="k", delay="3h")

    assert (change.status, change.count, len(change.handles)) == (RESCHEDULED, 2, 1)
    kit.harness.advance("2h")
    assert delivered(kit) == []
    kit.harness.advance("1h")
    assert sorted(delivered(kit)) == ["at the broker", "in the outbox"]


def test_a_message_that_is_sent_directly_after_a_cancel_is_not_cancelled(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    """The relay executes the change after the direct send."""
    send(engine, outbox, "first")
    kit.template.cancel(key="k")
    kit.template.sync_send("orders", "second", delay="1h", keys="k")

    kit.harness.advance("3h")

    assert delivered(kit) == ["second"]


def test_while_the_broker_is_down_the_relay_changes_its_messages_later(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    kit.template.sync_send("orders", "at the broker", delay="2h", keys="k")
    kit.broker.is_down = True
    send(engine, outbox, "in the outbox")

    with pytest.raises(BrokerError, match="the broker is down"):
        kit.template.cancel(key="unsent")
    change = kit.template.cancel(key="k")
    pass_down_time(kit, 1)
    kit.broker.is_down = False
    kit.harness.advance("3h")

    assert (change.status, change.count) == (CANCELLED, 1)
    assert (delivered(kit), rows_left(engine)) == ([], 0)


@pytest.mark.parametrize("key", ["50%_!", 'a"b\\c', "größe-7", "'k'"])
def test_keys_of_any_characters_are_found(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, key: str) -> None:
    send(engine, outbox, "with the key", keys=["x", key])
    send(engine, outbox, "with another key", keys=[f"{key}x", key.upper() + "y"])

    change = kit.template.cancel(key=key)
    kit.harness.advance("3h")

    assert (change.count, delivered(kit)) == (1, ["with another key"])


def test_a_handle_is_for_the_broker_only(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    handle = kit.template.sync_send("orders", "reminder", delay="1h").handle

    assert kit.template.cancel(handle).status is CANCELLED
    with pytest.raises(MessageError, match="name the pending message by its handle or by key"):
        kit.template.cancel(handle, key="k")


def test_errors_of_the_database_say_that_nothing_was_changed(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit
) -> None:
    kit.template.sync_send("orders", "reminder", delay="1h", keys="k")
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE mqtemplate_outbox"))

    with pytest.raises(sa.exc.SQLAlchemyError) as raised:
        kit.template.cancel(key="k")

    (note,) = raised.value.__notes__
    assert note == (
        "the outbox could not be changed, and the broker was not asked; in an open transaction call cancel or "
        "reschedule of the outbox: outbox.cancel(session, key=...)"
    )
    assert len(kit.template.pending("orders").messages) == 1


@pytest.mark.parametrize("options", [{"poolclass": StaticPool}, {}], ids=["StaticPool", "SingletonThreadPool"])
def test_the_template_does_not_end_a_transaction_on_the_only_connection(
    mqtemplate_template: RocketMQTemplate, options: dict[str, Any]
) -> None:
    """SQLite in memory has one connection: a second transaction on it would commit the first one."""
    engine = sa.create_engine("sqlite://", **options)
    metadata = sa.MetaData()
    outbox_tables(metadata)
    metadata.create_all(engine)
    outbox = SQLAlchemyOutbox(engine, mqtemplate_template)

    with Session(engine) as session:
        outbox.send(session, "orders", "reminder", delay="2h", keys="k")
        with pytest.raises(ConfigurationError, match="a transaction is open on the only connection .* call cancel"):
            mqtemplate_template.cancel(key="k")
        session.rollback()

    assert rows_left(engine) == 0
    assert mqtemplate_template.cancel(key="k").status is UNKNOWN
    engine.dispose()


# --- invalid calls, and tables of an older version -----------------------------------------------


def test_an_invalid_change_is_refused_in_the_transaction(engine: sa.Engine, outbox: SQLAlchemyOutbox) -> None:
    with Session(engine) as session:
        with pytest.raises(MessageError, match="a key must be one word, got 'two words'"):
            outbox.cancel(session, key="two words")
        with pytest.raises(MessageError, match="a key of at most 255 characters, got 256: .* by its message id"):
            outbox.cancel(session, key="k" * 256)
        with pytest.raises(MessageError, match="topic"):
            outbox.cancel(session, key="k", topic="no topic!")
        with pytest.raises(DelayError, match="delay and deliver_at are two delays"):
            outbox.reschedule(session, key="k", delay="1h", deliver_at=1_900_000_000_000)
    assert rows_left(engine) == 0


def test_a_table_of_an_older_version_is_named_at_the_start(engine: sa.Engine, outbox: SQLAlchemyOutbox) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("DROP INDEX mqtemplate_outbox_change_key"))
        connection.execute(sa.text("ALTER TABLE mqtemplate_outbox DROP COLUMN change_key"))

    with pytest.raises(ConfigurationError) as raised:
        outbox.on_start()

    assert str(raised.value) == (
        "table mqtemplate_outbox has no column change_key, since an older version created it; upgrade it with Alembic "
        "or 'manage.py migrate', or execute 'ALTER TABLE mqtemplate_outbox ADD COLUMN change_key VARCHAR(255)'"
    )
    with engine.begin() as connection:
        connection.execute(sa.text(str(raised.value).rpartition("execute '")[2].rstrip("'")))
    outbox.on_start()


# --- other outboxes, and handlers ----------------------------------------------------------------


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_handler_cancels_in_its_transaction(engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit) -> None:
    """The first call cancels and fails, so nothing is cancelled; the second one moves the message."""
    calls: list[str] = []

    @contextmanager
    def transaction() -> Iterator[OutboxSession[Session]]:
        with Session(engine) as session, session.begin():
            yield OutboxSession(outbox, session)

    @message_listener(topic="payments", consumer_group="reminders", retry=["1s"])
    def on_payment(order: str) -> None:
        with transaction() as unit:
            handle(order, unit)

    def handle(order: str, unit: OutboxSession[Session]) -> None:
        calls.append(order)
        if len(calls) == 1:
            unit.cancel(key=order)
            raise OSError("the database of another service is down")
        unit.reschedule(key=order, delay="5h")

    kit.start(on_payment)
    send(engine, outbox, "reminder", keys="order-7")
    kit.template.sync_send("payments", "order-7")

    kit.harness.advance("4h")
    assert (calls, delivered(kit)) == (["order-7"] * 2, [])
    kit.harness.advance("2h")

    assert delivered(kit) == ["reminder"]


def test_an_async_outbox_cancels_and_moves(url: str) -> None:
    """On the system clock: the messages stay pending, and `pending` shows their times."""

    async def main() -> dict[str | None, timedelta]:
        engine = create_async_engine(url.replace("sqlite://", "sqlite+aiosqlite://"))
        start = datetime.now(UTC)
        with FaultyBroker(None) as broker, RocketMQTemplate(broker, producer_group="shop") as template:
            outbox = AsyncSQLAlchemyOutbox(engine, template)
            with pytest.raises(ConfigurationError, match="the async outbox of this template is not started"):
                template.cancel(key="a")
            broker.is_down = True
            await outbox.on_start()
            with pytest.raises(EventLoopBlockedError, match=r"write 'await template\.async_cancel\(\.\.\.\)'"):
                template.cancel(key="a")
            async with AsyncSession(engine) as session, session.begin():
                for key in "abcde":
                    await outbox.send(session, "orders", key, delay="1h", keys=key)
                await outbox.cancel(session, key="a")
                await outbox.reschedule(session, key="b", deliver_at=start + timedelta(days=2))
            assert (await template.async_cancel(key="c")).status is CANCELLED
            moved = await template.async_reschedule(key="d", deliver_at=start + timedelta(days=3))
            assert (moved.status, moved.count) == (RESCHEDULED, 1)
            async with AsyncSession(engine) as session:
                await outbox.cancel(session, key="e")
                await session.rollback()
            broker.is_down = False

            async def is_relayed() -> bool:
                async with engine.connect() as connection:
                    return not (await connection.execute(sa.text("SELECT 1 FROM mqtemplate_outbox"))).all()

            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                eventually,
                lambda: asyncio.run_coroutine_threadsafe(is_relayed(), loop).result(60),
                "the relay has done all",
            )
            await outbox.on_stop()
            await engine.dispose()
            return {message.keys: message.deliver_at - start for message in template.pending("orders").messages}

    times = {key: round(delay / timedelta(hours=1)) for key, delay in asyncio.run(main()).items()}
    assert times == {"b": 48, "d": 72, "e": 1}


def test_two_outboxes_over_one_table_count_a_message_once(
    engine: sa.Engine, outbox: SQLAlchemyOutbox, kit: Kit, mqtemplate_template: RocketMQTemplate
) -> None:
    SQLAlchemyOutbox(engine, mqtemplate_template)
    send(engine, outbox, "reminder")

    assert kit.template.cancel(key="k").count == 1


def test_a_locked_database_of_the_callers_own_transaction_is_explained(
    url: str, mqtemplate_template: RocketMQTemplate
) -> None:
    """SQLite has one writer: the template would wait for the transaction that waits for the template."""
    if not url.startswith("sqlite"):
        pytest.skip("PostgreSQL locks rows only")
    engine = sa.create_engine(url, connect_args={"timeout": 0})
    outbox = SQLAlchemyOutbox(engine, mqtemplate_template)
    send(engine, outbox, "reminder")

    with Session(engine) as session, session.begin():
        session.execute(sa.text("INSERT INTO orders (id, state) VALUES (1, 'paid')"))
        with pytest.raises(sa.exc.OperationalError, match="database is locked") as raised:
            mqtemplate_template.cancel(key="k")

    assert isinstance(raised.value.orig, sqlite3.OperationalError)
    assert "in an open transaction call cancel or reschedule of the outbox" in raised.value.__notes__[0]
    engine.dispose()
