"""The pull of a member on the wire: what is asked, and what the answer means.

Source: RocketMQ ``client: PullAPIWrapper``, ``PullCallback``; section 10 of the specification.
"""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.consuming.pull_loop import Fetched, OffsetMoved, Outcome, PullFailed
from mqtemplate.brokers.remote.errors import answer_problem
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.selectors.tags import Selector, TagSelector

_MAX_BYTES = 256 << 10
_FLOW_CONTROL_MS = 20
_NOTHING = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY})
_UNKNOWN_HERE = frozenset({ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST})


def subscription_data(topic: str, selector: Selector, version: int) -> SubscriptionData:
    """A subscription as heartbeats tell it.

    Args:
        version: When it was made (epoch ms); of two of one group the larger counts.
    """
    if isinstance(selector, TagSelector):
        tags = sorted(selector.tags)
        expression = " || ".join(tags) or "*"
        return SubscriptionData(
            topic=topic, sub_string=expression, tags_set=tags, code_set=sorted(selector.codes), sub_version=version
        )
    return SubscriptionData(topic=topic, sub_string=selector.expression, sub_version=version, expression_type="SQL92")


class MemberPulls:
    """Asks brokers for a member's messages.

    Args:
        subscriptions: Topic -> selector and version, as the heartbeats of *instance* tell them.
        retry_topic: Its messages come with their first topic.
        on_unknown: Called when a broker does not know the member: it needs a heartbeat.
    """

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        namespace: Namespace,
        settings: RemoteSettings,
        group: str,
        subscriptions: dict[str, tuple[Selector, SubscriptionData]],
        retry_topic: str,
        marks: SentOffsets,
        on_unknown: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._settings = settings
        self._group = group
        self._wire_group = namespace.wrap(group)
        self._subscriptions = subscriptions
        self._retry_topic = retry_topic
        self._marks = marks
        self._on_unknown = on_unknown

    def fetch(
        self, queue: MessageQueue, queue_offset: int, broker_id: int, may_wait: bool, done: Callable[[Outcome], None], /
    ) -> None:
        """Send one pull; see `pull_loop.Fetch`."""
        address = self._routes.address(queue.broker_name, broker_id)
        wire = self._namespace.wrap_queue(queue)
        data = self._subscriptions[queue.topic][1]
        header = PullMessageRequestHeader(
            consumer_group=self._wire_group,
            topic=wire.topic,
            queue_id=wire.queue_id,
            queue_offset=queue_offset,
            max_msg_nums=self._settings.pull_batch_size,
            sys_flag=PullSysFlag.SUSPEND if may_wait else 0,
            commit_offset=0,
            suspend_timeout_millis=self._settings.suspend_ms if may_wait else 0,
            sub_version=data.sub_version,
            expression_type=data.expression_type,
            max_msg_bytes=_MAX_BYTES,
            broker_name=wire.broker_name,
        )
        request = RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
        self._instance.invoke_async(
            address,
            request,
            self._settings.pull_timeout_ms,
            lambda answer: done(self._outcome(queue, address, answer)),
        )

    def _outcome(self, queue: MessageQueue, address: str, answer: RemotingCommand | BrokerError) -> Outcome:
        retry_ms = self._settings.retry_after_error_ms
        if isinstance(answer, BrokerError):
            return PullFailed(str(answer), retry_ms)
        try:
            return self._read(queue, address, answer)
        except RemoteProtocolError as exc:
            return PullFailed(f"{address} sent what cannot be read: {exc}", retry_ms)

    def _read(self, queue: MessageQueue, address: str, answer: RemotingCommand) -> Outcome:
        if answer.code == ResponseCode.SUCCESS:
            header = answer.header(PullMessageResponseHeader)
            found = decode_messages(answer.body, queue.broker_name)
            if found:
                self._marks.see(queue.broker_name, found[-1].physical_offset)
            messages = self._wanted(queue, found)
            return Fetched(messages, header.next_begin_offset, header.suggest_which_broker_id)
        if answer.code in _NOTHING:
            header = answer.header(PullMessageResponseHeader)
            lags = header.max_offset < self._marks.end_of(queue)
            return Fetched([], header.next_begin_offset, header.suggest_which_broker_id, lags)
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            header = answer.header(PullMessageResponseHeader)
            return OffsetMoved(header.next_begin_offset, header.suggest_which_broker_id)
        if answer.code in _UNKNOWN_HERE:
            self._on_unknown()
        is_flow = answer.code == ResponseCode.FLOW_CONTROL
        problem = answer_problem(answer, f"group {self._group!r} reads {queue}", address)
        return PullFailed(str(problem), _FLOW_CONTROL_MS if is_flow else self._settings.retry_after_error_ms)

    def _wanted(self, queue: MessageQueue, messages: list[MessageExt]) -> list[MessageExt]:
        """Those that the selector means (a broker compares hashes of tags), with the names the application knows."""
        selector = self._subscriptions[queue.topic][0]
        if isinstance(selector, TagSelector) and not selector.selects_all:
            messages = [message for message in messages if selector.matches(message.properties)]
        for message in messages:
            message.topic = queue.topic
            if queue.topic == self._retry_topic and (first := message.properties.get(Property.RETRY_TOPIC)):
                message.topic = message.properties[Property.RETRY_TOPIC] = self._namespace.unwrap(first)
        return messages
