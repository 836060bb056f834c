"""Search for messages by id, key and time, and reading a topic as it grows."""

from __future__ import annotations

from mqtemplate.message import Message
from mqtemplate.operations import BrokerAccess, MessageSearch, Tail
from mqtemplate.selectors.tags import TagSelector
from tests.waiting import eventually


def test_messages_are_found_by_time_the_oldest_first(access: BrokerAccess) -> None:
    search = MessageSearch(access)

    found = list(search.by_time("orders"))

    times = [message.store_timestamp for message in found]
    assert times == sorted(times)
    assert {message.keys for message in found} == {f"order-{number}" for number in range(10)}
    assert list(search.by_time("orders", times[-1] + 1)) == []
    assert list(search.by_time("orders", 0, times[0] - 1)) == []
    assert len(list(search.by_time("orders", selector=TagSelector("paid")))) == 5


def test_the_newest_messages_of_a_topic(access: BrokerAccess) -> None:
    found = MessageSearch(access).newest("orders", 4)

    assert [message.store_timestamp for message in found] == sorted(message.store_timestamp for message in found)
    assert {message.queue_offset for message in found} <= {3, 4}
    assert len(found) == 4
    assert MessageSearch(access).newest("orders", 0) == []


def test_a_tail_returns_what_is_stored_after_its_start(access: BrokerAccess) -> None:
    tail = Tail.from_end(access, "orders", TagSelector("paid"))
    assert tail.poll() == []

    broker = access.open_for_changes()
    broker.sends.send(Message("orders", b"open", {"TAGS": "open"}))
    broker.sends.send(Message("orders", b"paid", {"TAGS": "paid"}))

    found = eventually(tail.poll, "the message is visible")
    assert [message.body for message in found] == [b"paid"]
    assert tail.poll() == []


def test_a_tail_may_start_at_a_time(access: BrokerAccess) -> None:
    assert len(Tail.from_time(access, "orders", 1).poll()) == 10
