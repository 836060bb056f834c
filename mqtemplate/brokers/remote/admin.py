"""Administration of a cluster: RocketMQ brokers, or servers of this library, by the requests of ``mqadmin``."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mqtemplate.broker import (
    MAX_IN_FLIGHT_SHOWN,
    BrokerAdmin,
    ConsumerGroups,
    GroupDeliveries,
    GroupInfo,
    GroupSubscription,
    InFlightMessage,
    Member,
    QueueProgress,
    QueueSpan,
    TopicKind,
    TopicSettings,
    unknown_name,
)
from mqtemplate.broker.hand_over import (
    HandOverCounts,
    HandOverError,
    HandOverPhase,
    HandOverState,
    MovedMessage,
    OldBroker,
    ReserveFilter,
    TransitMessage,
)
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.delayed.backlog import DelayConfigs
from mqtemplate.errors import BrokerError, UnsupportedError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies import own_requests as own
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.bodies.route import TopicConfigSerializeWrapper, TopicStatsTable
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.admin import (
    CreateTopicRequestHeader,
    GetAllTopicConfigRequestHeader,
    TopicNameRequestHeader,
)
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, is_system_group

_SUCCESS = (ResponseCode.SUCCESS,)
_NO_TOPIC = (ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SYSTEM_ERROR)
_NO_MEMBERS = (
    ResponseCode.SUCCESS,
    ResponseCode.CONSUMER_NOT_ONLINE,
    ResponseCode.BROADCAST_CONSUMPTION,
    ResponseCode.SYSTEM_ERROR,  # 4.x, for a group without members
)
_NO_GROUP = (ResponseCode.SUCCESS, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, ResponseCode.SYSTEM_ERROR)
_NO_REQUEST = (ResponseCode.SUCCESS, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
_END = -1
_HAND_OVER_MS = 30_000
"""A reservation reads thousands of records, and waits for the disk."""

Body = TypeVar("Body", bound=JsonBody)


class RemoteAdmin(BrokerAdmin):
    """Topics, groups and offsets of a cluster. Each request goes to all masters, and the responses are merged.

    With access control the account needs the rights of an administrator.

    Args:
        groups: Commits offsets of groups without connected members.
        configs: Settings of the brokers.
    """

    def __init__(self, context: ClientContext, groups: ConsumerGroups, configs: DelayConfigs) -> None:
        self._context = context
        self._groups = groups
        self._configs = configs
        self._names = context.namespace

    # --- topics --------------------------------------------------------------------------------

    def topic_kinds(self) -> dict[str, TopicKind]:
        return {name: each.kind for name, each in self.topic_settings().items()}

    def topic_settings(self) -> dict[str, TopicSettings]:
        """Return the settings of each topic: of several brokers the one with the most queues counts."""
        tables = self._read(
            RequestCode.GET_ALL_TOPIC_CONFIG,
            GetAllTopicConfigRequestHeader(),
            TopicConfigSerializeWrapper,
            "list topics",
        )
        found: dict[str, TopicSettings] = {}
        configs = [item for _, table in tables for item in table.topic_config_table.items()]
        for name, config in configs:
            topic, count = self._names.unwrap(name), max(config.read_queue_nums, config.write_queue_nums)
            if topic not in found or found[topic].queue_count < count:
                found[topic] = TopicSettings.of(topic, count, config.perm)
        return dict(sorted(found.items()))

    def set_topic_rights(self, topic: str, *, is_readable: bool, is_writable: bool) -> None:
        perm, wire_topic = (
            TopicSettings.perm_of(is_readable=is_readable, is_writable=is_writable),
            self._names.wrap(topic),
        )
        masters = self._context.routes.registered_masters()
        tables = self._read(
            RequestCode.GET_ALL_TOPIC_CONFIG,
            GetAllTopicConfigRequestHeader(),
            TopicConfigSerializeWrapper,
            "list topics",
        )
        configs = {name: table.topic_config_table.get(wire_topic) for name, table in tables}
        if not any(configs.values()):
            raise unknown_name("topic", topic, self.topic_names())
        for name, config in configs.items():
            if config is None or config.perm == perm:
                continue
            header = CreateTopicRequestHeader(
                topic=wire_topic,
                default_topic=AUTO_CREATE_TOPIC,
                read_queue_nums=config.read_queue_nums,
                write_queue_nums=config.write_queue_nums,
                perm=perm,
                topic_filter_type="SINGLE_TAG",
                topic_sys_flag=0,
                order=False,
            )
            request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
            self._context.call(masters[name], request, f"change the rights of topic {topic!r}")

    def delay_levels_ms(self) -> Sequence[int] | None:
        for name in self._context.routes.registered_masters():
            try:
                return self._configs.of(name).levels.delays_ms
            except BrokerError:  # access control may forbid the request
                continue
        return None

    def topic_shapes(self) -> Mapping[str, str]:
        """Return the shapes of the first server that has some: those of one cluster have one configuration."""
        for name in self._context.routes.registered_masters():
            try:
                shapes = self._configs.of(name).shapes
            except BrokerError:  # access control may forbid the request
                continue
            if shapes:
                return {self._names.unwrap(topic): shape for topic, shape in shapes.items()}
        return {}

    def queue_spans(self, topic: str) -> list[QueueSpan]:
        header = TopicNameRequestHeader(topic=self._names.wrap(topic))
        code = RequestCode.GET_TOPIC_STATS_INFO
        tables = self._read(code, header, TopicStatsTable, f"read topic {topic!r}", _NO_TOPIC)
        found = [
            QueueSpan(
                self._names.unwrap_queue(queue),
                max(0, each.min_offset),
                max(0, each.max_offset),
                each.last_update_timestamp if each.last_update_timestamp > 0 else None,
            )
            for _, table in tables
            for queue, each in table.offset_table.items()
        ]
        if not found:
            raise unknown_name("topic", topic, self.topic_names())
        return sorted(found, key=lambda span: span.queue)

    def delete_topic(self, topic: str) -> None:
        header = TopicNameRequestHeader(topic=self._names.wrap(topic))
        for address in self._context.routes.registered_masters().values():
            request = RemotingCommand.request(RequestCode.DELETE_TOPIC_IN_BROKER, header)
            self._context.call(address, request, f"delete topic {topic!r}")
        self._context.routes.name_servers.delete_topic(topic)
        self._context.routes.forget(topic)

    def groups_of(self, topic: str) -> list[str]:
        header = TopicNameRequestHeader(topic=self._names.wrap(topic))
        code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
        lists = self._read(code, header, bodies.GroupList, f"list the groups of topic {topic!r}", _NO_TOPIC)
        names = {name for _, found in lists for name in found.group_list}
        return sorted(self._names.unwrap(name) for name in names if not is_system_group(name))

    # --- groups --------------------------------------------------------------------------------

    def group_names(self) -> list[str]:
        code, header = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, headers.GetAllSubscriptionGroupRequestHeader()
        tables = self._read(code, header, bodies.SubscriptionGroupWrapper, "list groups")
        names = {name for _, table in tables for name in table.subscription_group_table}
        return sorted(self._names.unwrap(name) for name in names if not is_system_group(name))

    def group(self, name: str) -> GroupInfo:
        progress = self._progress(name)
        connections = self._connections(name)
        if not progress and not connections and name not in (names := self.group_names()):
            raise unknown_name("group", name, names)
        members = {each.client_id: each for found in connections for each in found.connection_set}
        subscriptions = {topic: data for found in connections for topic, data in found.subscription_table.items()}
        return GroupInfo(
            name,
            members=tuple(
                Member(client_id, members[client_id].client_addr, members[client_id].language)
                for client_id in sorted(members)
            ),
            subscriptions=tuple(
                GroupSubscription(self._names.unwrap(topic), data.sub_string or "*", data.expression_type or "TAG")
                for topic, data in sorted(subscriptions.items())
            ),
            progress=tuple(progress),
            message_model=connections[0].message_model if connections else None,
            consume_from_where=connections[0].consume_from_where if connections else None,
        )

    def _connections(self, group: str) -> list[bodies.ConsumerConnection]:
        header = headers.ConsumerGroupRequestHeader(consumer_group=self._names.wrap(group))
        code = RequestCode.GET_CONSUMER_CONNECTION_LIST
        found = self._read(code, header, bodies.ConsumerConnection, f"list the members of {group!r}", _NO_MEMBERS)
        return [each for _, each in found if each.connection_set]

    def _progress(self, group: str) -> list[QueueProgress]:
        header = headers.GetConsumeStatsRequestHeader(consumer_group=self._names.wrap(group))
        code = RequestCode.GET_CONSUME_STATS
        found = self._read(code, header, bodies.ConsumeStats, f"read the progress of {group!r}", _NO_GROUP)
        progress = [
            QueueProgress(
                self._names.unwrap_queue(queue),
                each.consumer_offset if each.consumer_offset >= 0 else None,
                each.broker_offset,
                last_consumed_ms=each.last_timestamp if each.last_timestamp > 0 else None,
            )
            for _, stats in found
            for queue, each in stats.offset_table.items()
        ]
        return sorted(progress, key=lambda each: each.queue)

    def deliveries(self, group: str) -> GroupDeliveries | None:
        """Return the messages of our servers. Brokers of RocketMQ tell only how many messages are in flight."""
        masters = self._context.routes.registered_masters()
        found = [each for name, address in masters.items() if (each := self._of(name, address, group))]
        if not found:
            return None
        messages = sorted((message for each in found for message in each.messages), key=lambda each: each.since_ms)
        expired = [each.expired for each in found if each.expired is not None]
        held = [each.held for each in found if each.held is not None]
        return GroupDeliveries(
            sum(each.in_flight for each in found),
            tuple(messages[:MAX_IN_FLIGHT_SHOWN]),
            sum(each.waiting for each in found),
            sum(expired) if expired else None,
            sum(held) if held else None,
        )

    def _of(self, broker_name: str, address: str, group: str) -> GroupDeliveries | None:
        wrapped, operation = self._names.wrap(group), f"read the deliveries of {group!r}"
        header = own.GetGroupDeliveriesRequestHeader(consumer_group=wrapped)
        request = RemotingCommand.request(RequestCode.GET_GROUP_DELIVERIES, header)
        response = self._context.call(address, request, operation, accept=_NO_REQUEST)
        if response.code == ResponseCode.SUCCESS:
            return self._our_deliveries(broker_name, own.GroupDeliveriesData.decode(response.body))
        stats = headers.GetConsumeStatsRequestHeader(consumer_group=wrapped)
        request = RemotingCommand.request(RequestCode.GET_CONSUME_STATS, stats)
        response = self._context.call(address, request, operation, accept=_NO_GROUP)
        if response.code != ResponseCode.SUCCESS or not response.body:
            return None
        table = bodies.ConsumeStats.decode(response.body).offset_table
        in_flight = sum(max(0, (each.pull_offset or 0) - each.consumer_offset) for each in table.values())
        return GroupDeliveries(in_flight) if in_flight else None

    def _our_deliveries(self, broker_name: str, data: own.GroupDeliveriesData) -> GroupDeliveries | None:
        if not data.reads_by_pop:
            return None
        messages = tuple(
            InFlightMessage(
                self._names.unwrap_queue(MessageQueue(each.stored_topic, broker_name, each.queue_id)),
                each.queue_offset,
                self._names.unwrap(each.topic),
                each.msg_id,
                each.keys,
                each.client,
                each.since,
                each.until,
                each.is_renewed,
                each.attempt,
                each.message_group,
                each.blocked,
            )
            for each in data.messages
        )
        return GroupDeliveries(data.in_flight, messages, data.waiting, data.expired, data.held)

    # --- offsets -------------------------------------------------------------------------------

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        if not self._connections(group):
            for queue, queue_offset in offsets.items():
                self._groups.commit_offset(group, queue, queue_offset)
            return
        old = sorted({queue.broker_name for queue in offsets if self._is_before_5(queue.broker_name)})
        if old:
            raise UnsupportedError(
                f"group {group!r} has connected members, and broker {', '.join(old)} is RocketMQ 4, which notifies "
                "members about whole topics only; stop the members, then set the offsets"
            )
        for queue, queue_offset in offsets.items():
            self._reset(group, queue, queue_offset)

    def create_group(self, name: str) -> None:
        wrapped = self._names.wrap(name)
        code, header = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, headers.GetAllSubscriptionGroupRequestHeader()
        tables = dict(self._read(code, header, bodies.SubscriptionGroupWrapper, "list groups"))
        for broker_name, address in self._context.routes.registered_masters().items():
            if broker_name in tables and wrapped in tables[broker_name].subscription_group_table:
                continue
            config = bodies.SubscriptionGroupConfig(group_name=wrapped)
            request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode())
            self._context.call(address, request, f"create group {name!r}")

    def forget_group(self, group: str) -> None:
        if members := sorted(each.client_id for found in self._connections(group) for each in found.connection_set):
            raise UnsupportedError(
                f"group {group!r} has members now ({', '.join(members[:5])}), so it is not gone; stop them first, or "
                f"move its offsets instead with: mqtemplate offsets reset {group} TOPIC --to latest"
            )
        header = headers.DeleteSubscriptionGroupRequestHeader(group_name=self._names.wrap(group), clean_offset=True)
        for address in self._context.routes.registered_masters().values():
            request = RemotingCommand.request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
            self._context.call(address, request, f"forget group {group!r}")

    def _is_before_5(self, broker_name: str) -> bool:
        return self._context.instance.is_before_5(self._context.routes.address(broker_name))

    def _reset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        header = headers.ResetOffsetRequestHeader(
            topic=self._names.wrap(queue.topic),
            group=self._names.wrap(group),
            queue_id=queue.queue_id,
            offset=queue_offset,
            timestamp=_END,
            is_force=True,
        )
        request = RemotingCommand.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)
        address = self._context.routes.address(queue.broker_name)
        self._context.call(address, request, f"set the offset of group {group!r} in {queue}")

    # --- requests ------------------------------------------------------------------------------

    def _read(
        self,
        code: int,
        header: CommandHeader,
        body: type[Body],
        operation: str,
        accept: Collection[int] = _SUCCESS,
    ) -> list[tuple[str, Body]]:
        """Send a request to each master. Return broker names and bodies of the responses with SUCCESS.

        Args:
            accept: Codes of responses that are not errors.
        """
        found = []
        for name, address in self._context.routes.registered_masters().items():
            response = self._context.call(address, RemotingCommand.request(code, header), operation, accept=accept)
            if response.code == ResponseCode.SUCCESS and response.body:
                found.append((name, body.decode(response.body)))
        return found


class RemoteHandOver(OldBroker):
    """The part of a server of this library in a hand-over. With access control the account is an administrator.

    Raises:
        UnsupportedError: The cluster has several brokers, or its broker has no hand-over.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self._namespace = context.namespace

    def _call(self, code: int, action: str, value: object = None, **fields: str | None) -> Any:
        names = self._context.routes.master_names()
        if len(names) != 1:
            raise UnsupportedError(
                f"a hand-over is from one broker, and this cluster has {len(names)}: {', '.join(names)}; start one for "
                "each, with the address of its server"
            )
        address = self._context.routes.address(names[0])
        header = own.HandOverRequestHeader(action=action, **fields)
        request = RemotingCommand.request(code, header, json.dumps(value).encode())
        response = self._context.instance.invoke(address, request, _HAND_OVER_MS)
        if response.code == ResponseCode.ILLEGAL_OPERATION:
            raise HandOverError(response.remark or action)
        if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedError(
                f"{address} has no hand-over: it is a broker of RocketMQ, or an older server of this library"
            )
        if response.code != ResponseCode.SUCCESS:
            raise response_error(response, f"hand-over: {action}", address)
        return json.loads(response.body)

    def _get(self, action: str, **fields: str | None) -> Any:
        return self._call(RequestCode.GET_HAND_OVER, action, **fields)

    def _change(self, action: str, value: object = None, owner: str | None = None) -> Any:
        return self._call(RequestCode.CHANGE_HAND_OVER, action, value, owner=owner)

    def _state(self, text: str) -> HandOverState:
        state = HandOverState.from_json(text)
        unwrap = self._namespace.unwrap
        return replace(state, topics=tuple(map(unwrap, state.topics)), groups=tuple(map(unwrap, state.groups)))

    def state(self) -> HandOverState | None:
        value = self._get("state")
        return None if value is None else self._state(value)

    def begin(self, target: str, topics: Collection[str] = (), groups: Collection[str] = ()) -> HandOverState:
        wrap = self._namespace.wrap
        names = {"topics": sorted(map(wrap, topics)), "groups": sorted(map(wrap, groups))}
        return self._state(self._change("begin", names | {"target": target}))

    def change(self, phase: HandOverPhase) -> HandOverState:
        return self._state(self._change("change", phase.value))

    def on_change(self, wake: Callable[[], None]) -> bool:
        return False

    def note_error(self, owner: str, error: str | None) -> None:
        self._change("note_error", error, owner)

    def note_brokers(self, owner: str, names: Collection[str]) -> None:
        self._change("note_brokers", sorted(names), owner)

    def remaining(self) -> list[str]:
        return list(self._get("remaining"))

    def counts(self) -> HandOverCounts:
        return HandOverCounts(**self._get("counts"))

    def lock(self, owner: str, lease_ms: int) -> bool:
        return bool(self._change("lock", lease_ms, owner))

    def unlock(self, owner: str) -> None:
        self._change("unlock", None, owner)

    def reserve(self, owner: str, max_count: int, chosen: ReserveFilter) -> int:
        wrap = self._namespace.wrap
        topics = None if chosen.topics is None else frozenset(map(wrap, chosen.topics))
        chosen = replace(
            chosen,
            topics=topics,
            without_topics=frozenset(map(wrap, chosen.without_topics)),
            namespace=self._context.settings.namespace or None,
        )
        return int(self._change("reserve", {"count": max_count, "filter": chosen.to_json()}, owner))

    def transit(self, max_count: int = 1_000) -> list[TransitMessage]:
        found = [TransitMessage.from_json(text) for text in self._change("transit", max_count)]
        for each in found:
            each.message.topic = self._namespace.unwrap(each.topic)
        return found

    def settle(self, owner: str, ended: Sequence[MovedMessage]) -> None:
        texts = [replace(each, topic=self._namespace.wrap(each.topic)).to_json() for each in ended]
        self._change("settle", texts, owner)

    def take_back(self, owner: str, messages: Sequence[Message]) -> None:
        texts = []
        for each in messages:
            wrapped = Message(self._namespace.wrap(each.topic), each.body, each.properties, each.flag)
            msg_id = each.properties[Property.UNIQ_KEY]
            back = TransitMessage(
                offset=0, msg_id=msg_id, deliver_ms=0, queue_id=0, delay_level=0, move_id="", message=wrapped
            )
            texts.append(back.to_json())
        self._change("take_back", texts, owner)

    def moved(self, msg_id: str, topic: str | None = None) -> MovedMessage | None:
        value = self._get("moved", msg_id=msg_id, topic=None if topic is None else self._namespace.wrap(topic))
        if value is None:
            return None
        ended = MovedMessage.from_json(value)
        return replace(ended, topic=self._namespace.unwrap(ended.topic))

    def is_reserved(self, msg_id: str, topic: str | None = None) -> bool:
        return bool(
            self._get("is_reserved", msg_id=msg_id, topic=None if topic is None else self._namespace.wrap(topic))
        )
