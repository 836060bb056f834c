"""Listeners whose keys take turns within their limits: in one member, and by POP over all members of a group."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate import ConsumeMode, MessageExt, MessageRequestMode, MQApplication
from mqtemplate.broker import Capability, ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.key_limits import KeyedQueue, KeyLimits
from mqtemplate.listener import message_listener
from mqtemplate.listener.declaration.decorator import listener_specs
from mqtemplate.listener.declaration.resolution import resolve_spec
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.testing import Harness
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.listener.conftest import App

POP = MessageRequestMode.POP
FIRST = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def send(broker: Any, *tenants: str, queue_id: int = 0) -> None:
    """Send a message of each tenant to one queue."""
    broker.queues("orders")
    for number, tenant in enumerate(tenants):
        properties = {"tenant": tenant} if tenant else {}
        queue = MessageQueue("orders", broker.name, queue_id)
        broker.sends.send(Message("orders", f"{tenant}{number}".encode(), properties), queue)


def resolved(**attributes: Any) -> Any:
    @message_listener("orders", "billing", **attributes)
    def bill(message: str) -> None: ...

    [spec] = listener_specs(bill)
    return resolve_spec(spec, name="bill")


# --- one member ----------------------------------------------------------------------------------


def test_the_keys_of_what_was_fetched_take_turns(app: App) -> None:
    handled: list[str] = []

    @message_listener("orders", "billing", fair_by="tenant", consume_from_where=FIRST)
    def bill(message: MessageExt) -> None:
        handled.append(message.properties.get("tenant", "-"))

    app.listen(bill)
    send(app.broker, "a", "a", "a", "a", "b", "", "b")
    app.run_until_idle()

    assert "".join(handled) == "ab-abaa"
    assert app.committed("billing") == 7


def test_a_key_keeps_its_rate_while_the_others_go_on(app: App) -> None:
    handled: list[tuple[int, str]] = []
    start_ms = app.broker.clock.now_ms()

    @message_listener("orders", "billing", fair_by="tenant", max_rate_per_key="10/s", consume_from_where=FIRST)
    def bill(message: MessageExt) -> None:
        handled.append((app.broker.clock.now_ms() - start_ms, message.properties["tenant"]))

    app.listen(bill)
    send(app.broker, *"aaaaaaaaaaaaaaaaaaaaaaaaab")
    app.advance("1s")

    of_a = [at_ms for at_ms, tenant in handled if tenant == "a"]
    assert of_a == [0, *range(0, 1_001, 100)]  # one more at the start
    assert (0, "b") in handled
    app.advance("10s")
    assert len(handled) == 26


def test_no_more_of_a_key_are_handled_at_a_time_than_its_limit(threaded_app: App) -> None:
    """All ten threads have a message, but two of a tenant at most."""
    lock, running, most = threading.Lock(), Counter[str](), Counter[str]()
    proceed, started, done = threading.Event(), SimpleQueue[str](), SimpleQueue[str]()

    @message_listener(
        "orders",
        "billing",
        fair_by="tenant",
        max_in_flight_per_key=2,
        consume_thread_number=10,
        consume_from_where=FIRST,
    )
    def bill(message: MessageExt) -> None:
        tenant = message.properties["tenant"]
        with lock:
            running[tenant] += 1
            most[tenant] = max(most[tenant], running[tenant])
        started.put(tenant)
        assert proceed.wait(PATIENCE_S)
        with lock:
            running[tenant] -= 1
        done.put(tenant)

    send(threaded_app.broker, *"aaaaaaaaaaaabbbbcc")
    threaded_app.listen(bill)
    first = [started.get(timeout=PATIENCE_S) for _ in range(6)]
    proceed.set()
    for _ in range(18):
        done.get(timeout=PATIENCE_S)

    assert sorted(first) == list("aabbcc")
    assert most == {"a": 2, "b": 2, "c": 2}


def test_a_message_that_fails_frees_its_key(app: App) -> None:
    handled: list[str] = []

    @message_listener("orders", "billing", fair_by="tenant", max_in_flight_per_key=1, consume_from_where=FIRST)
    def bill(message: MessageExt) -> None:
        handled.append(message.body.decode())
        if message.reconsume_times == 0:
            raise ValueError("not now")

    app.listen(bill)
    send(app.broker, "a", "a", "b")
    app.advance("1m")

    assert sorted(handled) == sorted(["a0", "a1", "b2"] * 2)


class Model:
    """What a `KeyedQueue` may give: per key in order, within the limits."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.waiting: dict[str, list[tuple[str, int]]] = {}
        self.in_flight: list[tuple[str, int]] = []

    def may_take(self, key: str) -> bool:
        count = sum(1 for item in self.in_flight if item[0] == key)
        return bool(self.waiting.get(key)) and (self.limits.max_in_flight is None or count < self.limits.max_in_flight)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc")),
            st.just(("take", "")),
            st.just(("end", "")),
            st.just(("put_back", "")),
        ),
        max_size=60,
    ),
    most=st.sampled_from([None, 1, 2]),
)
def test_a_keyed_queue_gives_each_item_once_in_the_order_of_its_key(
    steps: list[tuple[str, str]], most: int | None
) -> None:
    limits = KeyLimits("tenant", most)
    queue = KeyedQueue[tuple[str, int]](limits, lambda item: item[0], lambda: 0, lambda: None)
    model = Model(limits)
    for number, (action, key) in enumerate(steps):
        if action == "add":
            queue.append((key, number))
            model.waiting.setdefault(key, []).append((key, number))
        elif action == "take":
            can_take = any(map(model.may_take, "abc"))
            assert bool(len(queue)) == can_take
            if can_take:
                item = queue.popleft()
                assert model.may_take(item[0])
                assert model.waiting[item[0]].pop(0) == item
                model.in_flight.append(item)
        elif model.in_flight:
            item = model.in_flight.pop()
            if action == "put_back":
                queue.extendleft([item])
                model.waiting.setdefault(item[0], []).insert(0, item)
            queue.end(item)


# --- by POP: all members -------------------------------------------------------------------------


def test_the_limit_in_flight_holds_over_all_members_of_the_group(app: App) -> None:
    """The broker counts: the second member gets nothing of a tenant of which the first one has two messages."""
    broker, limits = app.broker, KeyLimits("tenant", 2)
    spec = ConsumerSpec(
        group="billing", subscriptions={"orders": TagSelector("*")}, consume_from_where=FIRST, key_limits=limits
    )
    members = [broker.pop.join(spec), broker.pop.join(spec)]
    send(broker, *"aaaaab")
    send(broker, *"aac", queue_id=1)

    def receive() -> list[Any]:
        return broker.pop.receive("billing", "orders", 32, 60_000, 0, None)

    first = receive()
    assert sorted(each.message.properties["tenant"] for each in first) == list("aabc")
    assert receive() == []
    [one, _] = [each for each in first if each.message.properties["tenant"] == "a"]
    broker.pop.ack("billing", "orders", one.receipt)
    [again] = receive()
    assert again.message.properties["tenant"] == "a"
    assert receive() == []
    for member in members:
        member.close()


def test_the_rate_of_a_key_holds_over_all_members_and_the_broker_wakes_them(app: App) -> None:
    clock, handled = app.broker.clock, list[tuple[int, str]]()
    start_ms = clock.now_ms()

    def member(name: str) -> Any:
        options: dict[str, Any] = {"request_mode": POP, "fair_by": "tenant", "max_rate_per_key": "10/s"}

        @message_listener("orders", "billing", id=name, consume_from_where=FIRST, **options)
        def bill(message: MessageExt) -> None:
            handled.append((clock.now_ms() - start_ms, message.properties["tenant"]))

        return bill

    app.listen(member("one"), member("two"))
    send(app.broker, *("a" * 60), "b")
    app.advance("3s")

    of_a = [at_ms for at_ms, tenant in handled if tenant == "a"]
    assert of_a == [0, *range(0, 3_001, 100)]  # one more at the start
    assert (0, "b") in handled


def test_what_is_in_flight_counts_after_a_restart(tmp_path: Path) -> None:
    clock, limits = VirtualClock(), KeyLimits("tenant", 2)
    spec = ConsumerSpec(
        group="billing", subscriptions={"orders": TagSelector("*")}, consume_from_where=FIRST, key_limits=limits
    )
    with EmbeddedBroker(tmp_path, clock=clock) as broker, closing(broker.pop.join(spec)):
        send(broker, *"aaaab")
        assert len(broker.pop.receive("billing", "orders", 32, 60_000, 0, None)) == 3

    with EmbeddedBroker(tmp_path, clock=clock) as broker, closing(broker.pop.join(spec)):
        assert broker.pop.receive("billing", "orders", 32, 60_000, 0, None) == []
        Harness(broker).advance("61s")  # they were not acknowledged: they come again
        again = broker.pop.receive("billing", "orders", 32, 60_000, 0, None)

    assert sorted(each.message.properties["tenant"] for each in again) == list("aab")


def test_the_limits_hold_over_the_processes_of_a_group_on_our_server() -> None:
    """Two applications; each has ten threads that wait. Of a tenant they have two messages together."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=HostAddress("127.0.0.1", 0)))
    lock, running, most = threading.Lock(), Counter[str](), Counter[str]()
    done: SimpleQueue[str] = SimpleQueue()

    def bill(message: MessageExt) -> None:
        tenant = message.properties["tenant"]
        with lock:
            running[tenant] += 1
            most[tenant] = max(most[tenant], running[tenant])
        handed_over.wait(0.01)
        with lock:
            running[tenant] -= 1
        done.put(tenant)

    handed_over = threading.Event()
    options: dict[str, Any] = {"request_mode": POP, "fair_by": "tenant", "max_in_flight_per_key": 2}
    listener = message_listener("orders", "billing", consume_from_where=FIRST, **options)(bill)
    with engine, LocalCluster(engine, BrokerServerSettings(listen=HostAddress("127.0.0.1", 0))) as cluster:
        engine.create_topic("orders", 1)
        send(engine, *("a" * 40), *("b" * 10))
        settings = {"rocketmq.name-server": str(cluster.address)}
        with (
            MQApplication(listener, settings=settings, environment={}) as one,
            MQApplication(listener, settings=settings, environment={}),
        ):
            assert Capability.KEY_LIMITS in one.broker.capabilities
            handled = Counter(done.get(timeout=PATIENCE_S) for _ in range(50))

    assert handled == {"a": 40, "b": 10}
    assert max(most.values()) <= 2


# --- refusals ------------------------------------------------------------------------------------


def test_limits_are_read_from_the_decorator() -> None:
    limits = resolved(fair_by="tenant", max_in_flight_per_key="2", max_rate_per_key="600/m").key_limits

    assert limits == KeyLimits("tenant", 2, 10.0)
    assert resolved().key_limits is None
    assert resolved(fair_by="hash_key").key_limits.property_name == "__SHARDINGKEY"


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            {"max_in_flight_per_key": 2},
            "max_in_flight_per_key is a limit for each key, but there is no key; add fair_by",
        ),
        ({"max_rate_per_key": "1/s"}, "max_rate_per_key is a limit for each key, but there is no key; add fair_by"),
        (
            {"fair_by": "t", "consume_mode": ConsumeMode.ORDERLY},
            "fair_by='t' and ORDERLY exclude each other: keys that",
        ),
        (
            {"fair_by": "t", "max_rate_per_key": "fast"},
            "a number of messages and a time, such as '10/s', .* got 'fast'",
        ),
        ({"fair_by": "t", "max_rate_per_key": "1/day"}, "max_rate_per_key must be a number of messages and a time"),
        ({"fair_by": "t", "max_rate_per_key": 0}, "max_rate_per_key must be a number of messages and a time"),
        ({"fair_by": "t", "max_in_flight_per_key": 0}, "a whole number from 1 to 100000, or None, got 0"),
    ],
)
def test_what_cannot_hold_is_refused(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(ListenerError, match=text):
        resolved(**attributes)


def test_by_pop_a_broker_that_does_not_count_keys_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a RocketMQ cluster is."""
    monkeypatch.setattr(app.broker, "capabilities", app.broker.capabilities - {Capability.KEY_LIMITS})

    @message_listener("orders", "billing", id="bill", request_mode=POP, fair_by="tenant")
    def bill(message: str) -> None: ...

    with pytest.raises(UnsupportedError, match="fair_by='tenant' with POP cannot be honoured.*remove request_mode=POP"):
        app.listen(bill)


def test_members_with_other_limits_are_refused(app: App) -> None:
    spec = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("*")}, key_limits=KeyLimits("tenant", 2))
    member = app.broker.pop.join(spec)

    with pytest.raises(ListenerError, match="give all listeners of the group the same fair_by, max_in_flight_per_key"):
        app.broker.pop.join(
            ConsumerSpec(group="billing", subscriptions={"orders": TagSelector("*")}, key_limits=KeyLimits("tenant", 3))
        )
    member.close()
