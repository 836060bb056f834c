"""POP by remote clients: messages with receipt handles, pops that wait, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.engine.pop.pop import HeldPop
from mqtemplate.message import HostAddress
from mqtemplate.record.layout import CHECK_NAME, MAX_PROPERTIES_BYTES
from mqtemplate.record.properties import encode_properties
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.remoting.protocol.headers.pop import PopMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, Right
from mqtemplate.store.settings import FlushDiskType
from tests.server.processors.pop_commands import GROUP, TOPIC, PopClient, bodies, read
from tests.server.serving import SECRET, RecordingConnection, Serving


@pytest.fixture
def client(serving: Serving) -> PopClient:
    serving.engine.create_topic(TOPIC, 2)
    return PopClient(serving)


def send(serving: Serving, *texts: bytes, queue_id: int = 0, **properties: str) -> None:
    for text in texts:
        serving.send(TOPIC, text, properties, queue_id=queue_id)


# --- messages and handles ---------------------------------------------------------------------------


def test_a_pop_returns_messages_of_all_queues_with_their_handles(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two")
    send(serving, b"three", queue_id=1)
    now_ms = serving.clock.now_ms()

    popped = client.pop()

    assert bodies(popped) == [b"one", b"three", b"two"]
    (two,) = [each for each in popped if each.body == b"two"]
    assert two.extra_info == f"0 {now_ms} 60000 0 0 broker-a 0 1"
    assert client.pop() == []


def test_a_pop_of_one_queue_leaves_the_others(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    send(serving, b"two", queue_id=1)

    assert bodies(client.pop(queue_id=1)) == [b"two"]
    assert bodies(client.pop(queue_id=0)) == [b"one"]


def test_a_pop_has_at_most_the_requested_number_and_tells_the_rest(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two", b"three")

    response = client.send_pop(max_msg_nums=2, queue_id=0)

    assert response is not None
    assert len(decode_messages(response.body, "broker-a")) == 2
    assert response.header(PopMessageResponseHeader).rest_num == 1


def test_a_response_fits_into_a_frame(serving: Serving, client: PopClient) -> None:
    """The messages that have no room stay for the next pop. One is returned whatever its size."""
    send(serving, *[b"x" * size for size in (3 << 20, 100_000, 100_000, 100_000)])

    assert [len(client.pop()), len(client.pop()), len(client.pop())] == [1, 2, 1]


def test_records_are_returned_as_they_are_stored_without_our_checksum(serving: Serving, client: PopClient) -> None:
    """The client adds the properties of the delivery itself."""
    send(serving, b"one", KEYS="k", colour="green")

    (popped,) = client.pop()

    assert popped.message.properties["colour"] == "green"
    assert {"POP_CK", CHECK_NAME} & popped.message.properties.keys() == set()


def test_two_members_get_different_messages(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two")
    other = PopClient(serving)

    first, second = client.pop(max_msg_nums=1), other.pop(max_msg_nums=1)

    assert bodies(first + second) == [b"one", b"two"]


def test_two_groups_get_the_same_messages(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")

    assert bodies(client.pop()) == bodies(client.pop(consumer_group="audit")) == [b"one"]


def test_a_message_that_is_not_acknowledged_comes_again_from_the_retry_topic(
    serving: Serving, client: PopClient
) -> None:
    """The record has the real topic and its handle: clients of RocketMQ do not know the name of the retry topic."""
    send(serving, b"one", KEYS="k")
    first_ms = serving.clock.now_ms()
    client.pop(invisible_time=5_000)
    serving.advance(4_999)
    before = client.pop()
    serving.advance(1)

    (again,) = client.pop()

    assert before == []
    assert (again.message.topic, again.body, again.count) == (TOPIC, b"one", 1)
    assert again.extra_info == again.message.properties["POP_CK"]
    assert again.extra_info.split(" ")[4:6] == ["1", "broker-a"]
    assert again.stored_topic == f"%RETRY%{GROUP}_{TOPIC}"
    assert again.message.properties["1ST_POP_TIME"] == str(first_ms)
    assert again.message.properties["KEYS"] == "k"


def test_a_retry_with_properties_that_leave_no_room_for_a_handle_has_the_stored_topic(
    serving: Serving, client: PopClient
) -> None:
    """Java's client makes the handle itself then: brokers with `popResponseReturnActualRetryTopic` always do that."""
    send(serving, b"short", long="x")
    client.ack(*client.pop())
    room = MAX_PROPERTIES_BYTES - len(encode_properties(serving.read(TOPIC)[0].properties))
    send(serving, b"long", long="x" * (room - 10))
    client.pop(invisible_time=1_000)
    serving.advance(1_000)

    response = client.send_pop()

    assert response is not None
    (message,) = decode_messages(response.body, "broker-a")
    assert "POP_CK" not in message.properties
    assert message.topic == f"%RETRY%{GROUP}_{TOPIC}"
    client.ack(*read(response))
    assert client.pop() == []


def test_after_the_last_attempt_a_message_is_a_dead_letter(serving: Serving, client: PopClient) -> None:
    """The number of attempts is a setting of the group."""
    serving.heartbeat(GROUP, TOPIC)
    config = serving.server.groups.ensure(GROUP)
    serving.server.groups.put([dataclasses.replace(config, retry_max_times=1)])
    send(serving, b"one")

    counts = []
    for _ in range(3):
        counts.append([each.count for each in client.pop(invisible_time=1_000)])
        serving.advance(1_000)

    assert counts == [[0], [1], []]
    assert [message.body for message in serving.read(f"%DLQ%{GROUP}")] == [b"one"]


# --- selection --------------------------------------------------------------------------------------


def test_a_pop_selects_by_tag(serving: Serving, client: PopClient) -> None:
    send(serving, b"open", TAGS="open")
    send(serving, b"paid", TAGS="paid")

    assert bodies(client.pop(exp="paid || late", exp_type="TAG")) == [b"paid"]
    assert client.pop(exp="open", exp_type="TAG") == [], "what was not selected is done for the group"


def test_a_pop_selects_by_sql92(serving: Serving, client: PopClient) -> None:
    send(serving, b"small", amount="3")
    send(serving, b"large", amount="300")

    assert bodies(client.pop(exp="amount > 100", exp_type="SQL92")) == [b"large"]


def test_sql92_is_refused_if_it_is_disabled() -> None:
    with Serving(BrokerServerSettings(enable_property_filter=False)) as serving:
        serving.engine.create_topic(TOPIC, 1)

        response = PopClient(serving).send_pop(exp="a > 1", exp_type="SQL92")

    assert response is not None
    assert response.code == ResponseCode.SYSTEM_ERROR
    assert "set enable-property-filter to true" in (response.remark or "")


# --- the first pop of a group -----------------------------------------------------------------------


def test_a_new_group_starts_at_the_first_message_if_the_client_wants_that(serving: Serving, client: PopClient) -> None:
    send(serving, b"one", b"two")

    assert bodies(client.pop(init_mode=0)) == [b"one", b"two"]


def test_a_new_group_of_a_young_topic_starts_at_its_first_message(serving: Serving, client: PopClient) -> None:
    """As in RocketMQ, for both modes."""
    send(serving, b"one", b"two")

    assert bodies(client.pop(init_mode=1)) == [b"one", b"two"]


# --- waiting ----------------------------------------------------------------------------------------


def test_a_pop_without_messages_waits_for_the_next_message(serving: Serving, client: PopClient) -> None:
    assert client.send_pop() is None
    assert client.held() == 1

    send(serving, b"one")
    serving.step()

    assert bodies(client.received()) == [b"one"]
    assert client.held() == 0


def test_a_pop_that_waits_gets_a_message_that_was_not_acknowledged_in_time(serving: Serving, client: PopClient) -> None:
    send(serving, b"one")
    client.pop(invisible_time=2_000)
    client.send_pop()

    serving.advance(2_000)

    (again,) = client.received()
    assert (again.body, again.count) == (b"one", 1)


def test_a_pop_without_messages_ends_after_its_time(serving: Serving, client: PopClient) -> None:
    client.send_pop(poll_time=3_000)
    serving.advance(2_999)
    before = len(client.connection.replies)

    serving.advance(1)

    (response,) = client.connection.replies
    assert before == 0
    assert (response.code, response.remark) == (ResponseCode.POLLING_TIMEOUT, "NO_MESSAGE_IN_QUEUE")
    assert response.header(PopMessageResponseHeader).rest_num == 0


def test_the_time_to_wait_counts_from_the_birth_of_the_request(serving: Serving, client: PopClient) -> None:
    """The request was two seconds on its way, and its client waits a second longer."""
    client.send_pop(poll_time=3_000, born_time=serving.clock.now_ms() - 2_000)

    serving.advance(1_000)

    assert [response.code for response in client.connection.replies] == [ResponseCode.POLLING_TIMEOUT]


def test_a_request_without_a_birth_is_as_old_as_its_arrival(serving: Serving, client: PopClient) -> None:
    assert client.send_pop(poll_time=3_000, born_time=0) is None


def test_a_pop_whose_client_has_stopped_waiting_pops_nothing(serving: Serving, client: PopClient) -> None:
    """Its messages would be invisible for nothing."""
    send(serving, b"one")

    response = client.send_pop(poll_time=3_000, born_time=serving.clock.now_ms() - 3_501)

    assert response is not None
    assert (response.code, response.body) == (ResponseCode.POLLING_TIMEOUT, b"")
    assert response.remark == (
        "the request arrived 501 ms after its time to wait ended, if the clocks of client and broker agree; its client "
        "does not wait any more"
    )
    assert bodies(client.pop()) == [b"one"]


def test_the_broker_limits_the_time_to_wait() -> None:
    with Serving(BrokerServerSettings(max_suspend_ms=1_000)) as serving:
        serving.engine.create_topic(TOPIC, 1)
        client = PopClient(serving)
        client.send_pop(poll_time=1 << 60)

        serving.advance(1_000)

        assert [response.code for response in client.connection.replies] == [ResponseCode.POLLING_TIMEOUT]


def test_the_pops_of_a_closed_connection_pop_nothing(serving: Serving, client: PopClient) -> None:
    client.send_pop()
    other = PopClient(serving)
    serving.disconnect(client.connection)

    send(serving, b"one")
    serving.step()

    assert bodies(other.pop()) == [b"one"]
    assert client.connection.replies == []
    assert other.held() == 0


def test_a_message_that_cannot_be_sent_is_visible_at_once(serving: Serving, client: PopClient) -> None:
    """The connection is closed, and the server has not noticed it yet. The delivery counts as no attempt."""
    client.send_pop()
    other = PopClient(serving)
    client.connection.is_open = False

    send(serving, b"one")
    serving.step()

    assert [(each.body, each.count) for each in other.pop()] == [(b"one", 0)]


def test_a_stop_of_the_server_answers_the_pops_that_wait(serving: Serving, client: PopClient) -> None:
    client.send_pop()

    serving.server.stop(0)

    assert [response.code for response in client.connection.replies] == [ResponseCode.POLLING_TIMEOUT]
    response = client.send_pop()
    assert response is not None
    assert (response.code, response.remark) == (
        ResponseCode.SERVICE_NOT_AVAILABLE,
        "the server is stopping; try again later",
    )


def test_a_pop_whose_connection_ends_before_it_is_held_does_not_wait(
    serving: Serving, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the engine for its whole time, and messages were popped for it and put back."""
    pop = serving.engine.engine.pop
    hold = pop.hold

    def hold_after_the_end(*arguments: Any) -> HeldPop:
        serving.disconnect(client.connection)
        return hold(*arguments)

    monkeypatch.setattr(pop, "hold", hold_after_the_end)
    client.send_pop()

    assert pop.count_held(GROUP, TOPIC) == 0
    assert len(serving.server.limits.pulls) == 0


def test_a_client_with_too_many_held_requests_gets_what_is_there_but_may_not_wait() -> None:
    limits = BrokerServerSettings(max_held_pulls_per_connection=1, max_held_pulls=2)
    with Serving(limits) as serving:
        serving.engine.create_topic(TOPIC, 1)
        client = PopClient(serving)
        client.send_pop(consumer_group="audit")

        full = client.send_pop()
        send(serving, b"one")
        found = client.pop()

    assert full is not None
    assert full.code == ResponseCode.POLLING_FULL
    assert full.remark == (
        "this connection may have 1 held pulls at one time, and this request would exceed that; let the client have "
        "fewer, or raise max-held-pulls, max-held-pulls-per-connection or max-address-share"
    )
    assert bodies(found) == [b"one"]


def test_the_broker_holds_a_limited_number_of_pops() -> None:
    with Serving(engine_settings=EmbeddedSettings(max_held_pops=1)) as serving:
        serving.engine.create_topic(TOPIC, 1)
        held, refused = PopClient(serving).send_pop(), PopClient(serving).send_pop()

    assert held is None
    assert refused is not None
    assert refused.code == ResponseCode.POLLING_FULL


def test_pops_of_an_account_whose_rights_changed_are_answered() -> None:
    """The next pop is checked again."""
    account = Account(
        access_key="shop-owner",
        secret_key=SECRET,
        topic_perms={TOPIC: Right.SUB},
        group_perms={GROUP: Right.SUB},
    )
    with Serving(acl=AclSettings(accounts=(account,))) as serving:
        serving.engine.create_topic(TOPIC, 1)
        client = PopClient(serving, RecordingConnection(access_key="shop-owner"))
        client.send_pop()

        serving.server.use_accounts(AclSettings(accounts=(dataclasses.replace(account, group_perms={}),)))

        assert [response.code for response in client.connection.replies] == [ResponseCode.POLLING_TIMEOUT]
        refused = client.send_pop()
    assert refused is not None
    assert refused.code == ResponseCode.NO_PERMISSION


# --- in order ---------------------------------------------------------------------------------------


def test_an_ordered_pop_blocks_its_queue_until_its_messages_are_acknowledged(
    serving: Serving, client: PopClient
) -> None:
    send(serving, b"one", b"two")

    first = client.pop(order=True, max_msg_nums=1, queue_id=0)
    blocked = client.pop(order=True, max_msg_nums=1, queue_id=0)
    client.ack(*first)
    second = client.pop(order=True, max_msg_nums=1, queue_id=0)

    assert (bodies(first), blocked, bodies(second)) == ([b"one"], [], [b"two"])
    assert first[0].extra_info.split(" ")[3] == "999"


def test_the_count_of_an_ordered_message_is_in_the_header(serving: Serving, client: PopClient) -> None:
    """It is delivered again from its queue, so its record has the old number."""
    send(serving, b"one")
    client.pop(order=True, invisible_time=1_000)
    serving.advance(1_000)

    (again,) = client.pop(order=True)

    assert (again.count, again.message.reconsume_times, again.message.topic) == (1, 0, TOPIC)


def test_a_pop_that_waits_in_order_gets_the_next_message_after_the_acknowledgement(
    serving: Serving, client: PopClient
) -> None:
    send(serving, b"one", b"two")
    first = client.pop(order=True, max_msg_nums=1)
    other = PopClient(serving)
    other.send_pop(order=True)

    client.ack(*first)
    serving.step()

    assert bodies(other.received()) == [b"two"]


def test_a_repeated_ordered_pop_gets_the_same_messages(serving: Serving, client: PopClient) -> None:
    """Its response may be lost."""
    send(serving, b"one")

    first, again = client.pop(order=True, attempt_id="a1"), client.pop(order=True, attempt_id="a1")

    assert (bodies(first), bodies(again)) == ([b"one"], [b"one"])
    assert again[0].count == 0


# --- durability -------------------------------------------------------------------------------------


def test_a_message_is_not_popped_before_it_is_durable() -> None:
    with Serving(engine_settings=EmbeddedSettings(flush_disk_type=FlushDiskType.SYNC_FLUSH)) as serving:
        serving.engine.create_topic(TOPIC, 1)
        client = PopClient(serving)
        serving.send(TOPIC, b"safe")

        assert bodies(client.pop()) == [b"safe"]


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"max_msg_nums": 33}, ResponseCode.INVALID_PARAMETER, "maxMsgNums must be 1..32, got 33"),
        ({"max_msg_nums": 0}, ResponseCode.INVALID_PARAMETER, "maxMsgNums must be 1..32, got 0"),
        (
            {"invisible_time": 0},
            ResponseCode.INVALID_PARAMETER,
            "invisibleTime must be 1..31536000000 ms, got 0",
        ),
        (
            {"attempt_id": "x" * 257},
            ResponseCode.INVALID_PARAMETER,
            "attemptId has 257 characters, allowed are 256",
        ),
        (
            {"topic": "nowhere"},
            ResponseCode.TOPIC_NOT_EXIST,
            "topic 'nowhere' does not exist; its first message creates it",
        ),
        (
            {"queue_id": 2},
            ResponseCode.INVALID_PARAMETER,
            "the queue ID of topic 'orders' must be 0..1, got 2; update the route",
        ),
        (
            {"exp": "a >", "exp_type": "SQL92"},
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            None,
        ),
        (
            {"consumer_group": "a b"},
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            "'a b' is not a valid group name; use at most 248 letters, digits, '_', '-', '%', '|'",
        ),
    ],
)
def test_a_pop_that_is_not_valid_is_refused(
    serving: Serving, client: PopClient, fields: dict[str, Any], code: ResponseCode, remark: str | None
) -> None:
    response = client.send_pop(**fields)

    assert response is not None
    assert response.code == code
    assert remark is None or response.remark == remark


def test_a_group_that_may_not_be_created_is_refused() -> None:
    with Serving(BrokerServerSettings(auto_create_subscription_group=False)) as serving:
        serving.engine.create_topic(TOPIC, 1)

        response = PopClient(serving).send_pop()

    assert response is not None
    assert (response.code, response.remark) == (
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "group 'billing' does not exist; create it first, or set auto-create-subscription-group to true",
    )


def test_a_group_that_may_not_consume_is_refused(serving: Serving, client: PopClient) -> None:
    config = serving.server.groups.ensure(GROUP)
    serving.server.groups.put([dataclasses.replace(config, consume_enable=False)])

    response = client.send_pop()

    assert response is not None
    assert response.code == ResponseCode.NO_PERMISSION


def test_a_topic_that_is_not_readable_is_refused(serving: Serving, client: PopClient) -> None:
    serving.engine.engine.topics.update(TOPIC, {"perm": 2})

    response = client.send_pop()

    assert response is not None
    assert (response.code, response.remark) == (
        ResponseCode.NO_PERMISSION,
        "topic 'orders' is not readable (perm)",
    )


def test_clients_of_one_address_share_the_limit_of_held_requests() -> None:
    """Others may still wait."""
    limits = BrokerServerSettings(max_held_pulls=4, max_held_pulls_per_connection=1)
    with Serving(limits) as serving:
        serving.engine.create_topic(TOPIC, 1)
        first = [PopClient(serving) for _ in range(3)]
        other = PopClient(serving, RecordingConnection(HostAddress("127.0.0.2", 1)))

        held = [each.send_pop(consumer_group=f"g{number}") for number, each in enumerate([*first, other])]

    assert [None if response is None else response.code for response in held] == [
        None,
        None,
        ResponseCode.POLLING_FULL,
        None,
    ]


def test_a_new_queue_is_popped_too(serving: Serving, client: PopClient) -> None:
    client.pop()
    header = CreateTopicRequestHeader(
        topic=TOPIC,
        default_topic="TBW102",
        read_queue_nums=3,
        write_queue_nums=3,
        perm=6,
        topic_filter_type="SINGLE_TAG",
        order=False,
    )
    serving.request(17, header)

    send(serving, b"new", queue_id=2)

    assert bodies(client.pop()) == [b"new"]


def test_an_ordered_message_that_comes_again_can_be_acknowledged_with_others(
    serving: Serving, client: PopClient
) -> None:
    """The bits of the request count from the start offset of the response, so it is not after the message."""
    send(serving, b"one", b"two")
    client.pop(order=True, invisible_time=1_000)
    serving.advance(1_000)
    again = client.pop(order=True)

    client.ack_all(again)

    assert [each.count for each in again] == [1, 1]
    assert client.pop(order=True) == []
    assert serving.engine.engine.offsets.offset(GROUP, TOPIC, 0) == 2
