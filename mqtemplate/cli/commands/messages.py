"""``send``, ``tail`` and ``messages``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.formats import body_of, duration, future_time, message_fields, named_values, past_time, record_of
from mqtemplate.cli.invocation import TOP, CommandCall, command, existing_file, topic_names
from mqtemplate.cli.output import Columns
from mqtemplate.converters.readable import pretty_body, properties_text, short_body, time_text
from mqtemplate.pending import OnPending

if TYPE_CHECKING:
    from mqtemplate.message import MessageExt
    from mqtemplate.operations import BrokerAccess, Tail
    from mqtemplate.results import SendResult
    from mqtemplate.selectors.tags import Selector

_POLL_S = 0.3
_SHOWN = 20
_MESSAGE_COLUMNS: Columns = {
    "STORED": lambda record: time_text(record["store_timestamp"]),
    "QUEUE": "queue_id",
    "OFFSET": "queue_offset",
    "TAG": "tags",
    "KEYS": "keys",
    "ID": "msg_id",
    "BODY": lambda record: short_body(body_of(record)),
}
_FIELDS: Columns = {
    "id": "msg_id",
    "offset id": "offset_msg_id",
    "topic": "topic",
    "tag": "tags",
    "keys": "keys",
    "broker": "broker_name",
    "queue": "queue_id",
    "queue offset": "queue_offset",
    "born": lambda record: f"{time_text(record['born_timestamp'])} at {record['born_host']}",
    "stored": lambda record: time_text(record["store_timestamp"]),
    "retries": "reconsume_times",
    "properties": lambda record: properties_text(record["properties"]),
    "body": lambda record: pretty_body(body_of(record)),
}

Tags = Annotated[str | None, typer.Option("--tags", metavar="TAGS", help="tags, as 'paid || refunded'")]
Sql = Annotated[str | None, typer.Option(metavar="EXPRESSION", help="an SQL92 expression over properties")]
Key = Annotated[str | None, typer.Option(metavar="KEY", help="only messages with this key or id")]


# --- send ---------------------------------------------------------------------------------------


@command(
    TOP,
    "send",
    "send orders:paid '{\"id\": 4466}' --key 4466",
    "send reminders 'call back' --delay 3h",
    "send reminders 'call back' --at 2026-01-31T08:00",
    "send reminders:cart 'still there?' --delay 15m --pending-key cart-17 --on-pending postpone --no-later-than 2h",
    "send orders --file order.json --property region=eu",
    "send orders --lines < orders.jsonl",
)
def send(
    call: CommandCall,
    destination: Annotated[str, typer.Argument(metavar="TOPIC[:TAG]", autocompletion=topic_names)],
    body: Annotated[str | None, typer.Argument(metavar="[BODY]", help="the text of the message")] = None,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="read the body from a file; - is the input")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="send each line of the standard input as a message")] = False,
    key: Annotated[list[str], typer.Option(metavar="KEY", help="a business key; may be repeated")] = [],  # noqa: B006
    prop: Annotated[
        list[str], typer.Option("--property", metavar="NAME=VALUE", help="a property; may be repeated")
    ] = [],  # noqa: B006
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="deliver later: 90s, 3h, '1h 30m'")] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="deliver at a time: 2026-01-31T08:00, epoch ms")
    ] = None,
    level: Annotated[int, typer.Option(help="delay level; 0: no delay")] = 0,
    hash_key: Annotated[str | None, typer.Option(metavar="KEY", help="equal keys go to one queue, in order")] = None,
    pending_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="with a delay: at most one message is pending under it")
    ] = None,
    on_pending: Annotated[
        OnPending | None, typer.Option(help="with --pending-key, if a message is pending; replace is the default")
    ] = None,
    no_later_than: Annotated[
        str | None, typer.Option(metavar="DURATION", help="with postpone: at most this long after the first send")
    ] = None,
    on_pending_strict: Annotated[
        bool, typer.Option("--on-pending-strict", help="refuse a cluster that decides in two steps")
    ] = False,
    count: Annotated[int, typer.Option(min=1, help="send the message this number of times")] = 1,
    rate: Annotated[float | None, typer.Option(help="most messages per second")] = None,
) -> None:
    """Send a message, at once or delayed; or many."""
    from mqtemplate.operations.bulk import paced
    from mqtemplate.template.rocketmq_template import RocketMQTemplate

    bodies = _bodies(body, file, lines=lines)
    with call.access(create=True) as access:
        broker = access.open_for_changes()
        now_ms = broker.clock.now_ms()
        options: dict[str, Any] = {
            "delay_level": level,
            "delay": None if delay is None else _span(delay, "--delay"),
            "deliver_at": future_time(at, now_ms, "--at"),
            "hash_key": hash_key,
            "pending_key": pending_key,
            "on_pending": on_pending,
            "no_later_than": None if no_later_than is None else _span(no_later_than, "--no-later-than"),
            "on_pending_strict": on_pending_strict,
            "keys": key,
            "headers": named_values(prop, "--property"),
        }
        template = RocketMQTemplate(broker)
        results: list[SendResult] = []
        with call.output.progress("sending", None if lines or count == 1 else count) as advance:
            for each in paced((each for each in bodies for _ in range(count)), rate, broker.clock):
                results.append(template.sync_send(destination, each, **options))
                advance(1)
    _print_results(call, results)


def _span(text: str, option: str) -> timedelta:
    return timedelta(milliseconds=duration(text, option))


def _bodies(body: str | None, file: Path | None, *, lines: bool) -> Iterator[bytes]:
    if [body is not None, file is not None, lines].count(True) != 1:
        raise typer.BadParameter("give the body as an argument, or --file, or --lines", param_hint="BODY")
    if lines:
        return (line.rstrip(b"\r\n") for line in sys.stdin.buffer if line.strip())
    return iter([existing_file(file) if file is not None else (body or "").encode()])


def _print_results(call: CommandCall, results: list[SendResult]) -> None:
    queue = ("message_queue.topic", "message_queue.broker_name", "message_queue.queue_id")
    names = ("send_status", "msg_id", "offset_msg_id", *queue, "queue_offset", "handle")
    records = [{**record_of(each, *names), **_pending_fields(each)} for each in results]
    columns: dict[str, str | Callable[[Any], object]] = {
        "STATUS": "send_status",
        "ID": "msg_id",
        "TOPIC": "topic",
        "QUEUE": "queue_id",
        "OFFSET": "queue_offset",
    }
    if any(record["handle"] for record in records):
        columns["HANDLE"] = "handle"
    if any("decision" in record for record in records):
        columns["PENDING"] = lambda record: record.get("decision")
    if call.as_json or len(records) <= _SHOWN:
        call.output.table(records, columns, "nothing to send")
    else:
        call.output.line(f"sent {len(records)} messages to {records[0]['topic']}")


def _pending_fields(result: SendResult) -> dict[str, Any]:
    """Return what happened to the message that was pending under the pending key; empty without a key."""
    outcome = result.pending
    if outcome is None:
        return {}
    fields = {"decision": outcome.decision.value, "replaced": list(outcome.replaced)}
    return {**fields, "already_delivered": outcome.already_delivered}


# --- tail and messages --------------------------------------------------------------------------


@command(
    TOP,
    "tail",
    "tail orders",
    "tail orders --tags paid --from 10m",
    "tail orders --from earliest --no-follow --json",
    "tail '%DLQ%billing' --last 50",
)
def tail(
    call: CommandCall,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=topic_names)],
    tags: Tags = None,
    sql: Sql = None,
    key: Key = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="'earliest', 'latest', or a time: 10m (ago), epoch ms")
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="show this number of older messages first")] = 10,
    max_count: Annotated[int | None, typer.Option(min=1, help="end after this number of messages")] = None,
    no_follow: Annotated[bool, typer.Option("--no-follow", help="end after the stored messages")] = False,
) -> None:
    """Show the messages of a topic as they are stored, until Ctrl-C. With --json one line for each message.

    It joins no consumer group, so it takes no message from a consumer. Retry, dead-letter and system topics work too.
    """
    from mqtemplate.context.signals import StopRequests
    from mqtemplate.message import key_text, split_keys

    key = None if key is None else key_text(key)
    selector = _selector(tags, sql)
    # Not by KeyboardInterrupt: Python ignores one that is raised while an object of the last poll is removed.
    stop_requests = StopRequests()
    with call.access() as access, stop_requests.from_signals():
        follow = _tail(access, topic, start, last, selector)
        shown = 0
        while True:
            for message in follow():
                if key is None or key in (message.msg_id, *split_keys(message.keys)):
                    _print_message(call, message)
                    shown += 1
                if shown == max_count:
                    return
            if no_follow or stop_requests.wait_up_to(_POLL_S):
                return


def _tail(
    access: BrokerAccess, topic: str, start: str | None, last: int, selector: Selector | None
) -> Callable[[], list[MessageExt]]:
    """Return a function that returns the next messages: the older ones at its first call."""
    from mqtemplate.operations import MessageSearch, Tail

    if start is not None:
        return _tail_from(access, topic, start, selector).poll
    newer = Tail.from_end(access, topic, selector)
    newest = MessageSearch(access).newest(topic, last, selector)
    older = [[each for each in newest if each.queue_offset < newer.end_of(each)]]
    return lambda: older.pop() if older else newer.poll()


def _tail_from(access: BrokerAccess, topic: str, start: str, selector: Selector | None) -> Tail:
    from mqtemplate.operations import Tail

    if start == "latest":
        return Tail.from_end(access, topic, selector)
    time_ms = 1 if start == "earliest" else past_time(start, access.broker.clock.now_ms(), "--from")
    return Tail.from_time(access, topic, time_ms or 1, selector)


def _print_message(call: CommandCall, message: MessageExt) -> None:
    record = message_fields(message)
    if call.as_json:
        call.output.json_line(record)
        return
    words = [f"{record['queue_id']}/{record['queue_offset']}", record["tags"] or "-", record["keys"] or "-"]
    call.output.line(f"{time_text(message.store_timestamp)}  {'  '.join(words)}  {short_body(message.body)}")


@command(
    TOP,
    "messages",
    "messages --id 7F0000010000000000000000000000A1",
    "messages orders --key 4466",
    "messages orders --from yesterday --to yesterday --max-count 500 --json",
    is_list=True,
)
def messages(
    call: CommandCall,
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", autocompletion=topic_names)] = None,
    msg_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="show one message: both ids work, and the beginning of one"),
    ] = None,
    key: Key = None,
    tags: Tags = None,
    sql: Sql = None,
    start: Annotated[str | None, typer.Option("--from", metavar="TIME", help="stored since: 2h (ago), a time")] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="TIME", help="stored until: 1h (ago), a time")] = None,
    max_count: Annotated[int, typer.Option(min=1, help="most messages")] = 100,
) -> None:
    """Find stored messages by id, by key, or by time."""
    from mqtemplate.errors import UnknownNameError
    from mqtemplate.operations import MessageSearch

    if topic is None and msg_id is None:
        raise typer.BadParameter("give a topic, or --id", param_hint="TOPIC")
    with call.access() as access:
        search = MessageSearch(access)
        if msg_id is not None:
            call.output.fields(message_fields(_by_id(access, msg_id, topic)), _FIELDS)
            return
        now_ms = access.broker.clock.now_ms()
        begin_ms, end_ms = past_time(start, now_ms, "--from") or 0, past_time(end, now_ms, "--to", is_end=True)
        if key is not None:
            found = search.by_key(topic or "", key, max_count, begin_ms, end_ms)
        else:
            stored = search.by_time(topic or "", begin_ms, end_ms, _selector(tags, sql))
            found = [message for message, _ in zip(stored, range(max_count), strict=False)]
    if not found and not call.as_json:
        raise UnknownNameError(f"topic {topic!r} has no such message")
    call.output.table([message_fields(each) for each in found], _MESSAGE_COLUMNS, "no messages")


def _by_id(access: BrokerAccess, msg_id: str, topic: str | None) -> MessageExt:
    """Return the message with an id, or the only one whose id begins so.

    Raises:
        UnknownNameError: There is none, or several ids begin so.
    """
    from mqtemplate.errors import UnknownNameError
    from mqtemplate.operations import MessageSearch
    from mqtemplate.operations.search import messages_beginning

    try:
        return MessageSearch(access).by_id(msg_id, topic)
    except UnknownNameError:
        found = [each for each in messages_beginning(access, msg_id, topic) if each.deliver_ms is None]
        if not found:
            raise
        return MessageSearch(access).by_id(found[0].msg_id, found[0].topic)


def _selector(tags: str | None, sql: str | None) -> Selector | None:
    from mqtemplate.selectors.sql92 import make_selector
    from mqtemplate.selectors.tags import SelectorType

    if tags is not None and sql is not None:
        raise typer.BadParameter("give --tags or --sql, not both", param_hint="--sql")
    if sql is not None:
        return make_selector(SelectorType.SQL92, sql)
    return None if tags is None else make_selector(SelectorType.TAG, tags)
