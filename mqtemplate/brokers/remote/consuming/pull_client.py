"""Pulls of a group member: the requests, and the outcome of each response.

Source: RocketMQ ``client: PullAPIWrapper``, ``PullCallback``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.consuming.pull_loop import Outcome, Pulled, PullFailed
from mqtemplate.brokers.remote.errors import response_error
from mqtemplate.brokers.remote.subscriptions import PULL_RESPONSES, Subscription, matching_messages
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.remote")

_MAX_BYTES = 256 << 10
_FLOW_CONTROL_MS = 20
_UNKNOWN_MEMBER = frozenset({ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST})


@dataclass(eq=False)
class PullClient:
    """Sender of the pulls of one group member.

    Args:
        subscriptions: By topic, as in the heartbeats of the context's instance.
        carried: Returns the offset that a pull of a queue commits on its way; 0 for none.
        on_unknown_member: Called when a broker does not have the member's subscription: it needs a heartbeat.
    """

    context: ClientContext
    group: str
    subscriptions: Mapping[str, Subscription]
    carried: Callable[[MessageQueue], int]
    on_unknown_member: Callable[[], None]

    def __post_init__(self) -> None:
        self._settings = self.context.settings
        self._wire_group = self.context.namespace.wrap(self.group)
        self._retry_topic = RETRY_TOPIC_PREFIX + self.group

    def pull(
        self, queue: MessageQueue, queue_offset: int, broker_id: int, may_wait: bool, done: Callable[[Outcome], None], /
    ) -> None:
        """Send one pull; see `pull_loop.Pull`."""
        address = self.context.routes.address(queue.broker_name, broker_id)
        subscription = self.subscriptions[queue.topic].data
        carried = self.carried(queue)
        suspend = PullSysFlag.SUSPEND if may_wait and self._settings.suspend_ms else 0
        header = PullMessageRequestHeader(
            **self.context.namespace.queue_fields(queue),
            consumer_group=self._wire_group,
            queue_offset=queue_offset,
            max_msg_nums=self._settings.pull_batch_size,
            sys_flag=suspend | PullSysFlag.COMMIT_OFFSET if carried else suspend,
            commit_offset=carried,
            suspend_timeout_millis=self._settings.suspend_ms if may_wait else 0,
            sub_version=subscription.sub_version,  # the broker has the subscription from a heartbeat
            expression_type=subscription.expression_type,
            max_msg_bytes=_MAX_BYTES,
        )
        request = RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
        self.context.instance.invoke_async(
            address, request, self._settings.pull_timeout_ms, lambda answer: done(self._outcome(queue, address, answer))
        )

    def _outcome(self, queue: MessageQueue, address: str, response: RemotingCommand | BrokerError) -> Outcome:
        retry_ms = self._settings.retry_after_error_ms
        self.context.instance.report(address, response)
        if isinstance(response, BrokerError):
            return PullFailed(response, retry_ms)
        try:
            return self._read(queue, address, response)
        except RemoteProtocolError as exc:
            return PullFailed(RemoteProtocolError(f"{address} sent an invalid response: {exc}"), retry_ms)

    def _read(self, queue: MessageQueue, address: str, response: RemotingCommand) -> Outcome:
        if response.code not in PULL_RESPONSES:
            return self._refused(queue, address, response)
        header = response.header(PullMessageResponseHeader)
        messages, lags = [], False
        if response.code == ResponseCode.SUCCESS:
            found = decode_messages(response.body, queue.broker_name, self._settings.max_body_bytes)
            if found:
                self.context.sent.add_seen(queue.broker_name, found[-1].physical_offset)
            messages = matching_messages(found, self.subscriptions[queue.topic].selector)
            self._set_topics(queue, messages)
        elif response.code == ResponseCode.PULL_OFFSET_MOVED:
            _log.warning(
                "remote.offset_moved", topic=queue.topic, queue=queue.queue_id, next_offset=header.next_begin_offset
            )
        else:
            lags = header.max_offset < self.context.sent.queue_end(queue)
        return Pulled(messages, header.next_begin_offset, header.suggest_which_broker_id, lags)

    def _refused(self, queue: MessageQueue, address: str, response: RemotingCommand) -> PullFailed:
        is_unknown = response.code in _UNKNOWN_MEMBER
        if is_unknown:
            self.on_unknown_member()
        problem = response_error(response, f"group {self.group!r} reads {queue}", address)
        is_flow_control = response.code == ResponseCode.FLOW_CONTROL
        retry_ms = _FLOW_CONTROL_MS if is_flow_control else self._settings.retry_after_error_ms
        return PullFailed(problem, retry_ms, is_unknown)

    def _set_topics(self, queue: MessageQueue, messages: list[MessageExt]) -> None:
        """Give the messages the application's topic names."""
        for message in messages:
            message.topic = queue.topic
            if queue.topic == self._retry_topic and (original := message.properties.get(Property.RETRY_TOPIC)):
                message.topic = message.properties[Property.RETRY_TOPIC] = self.context.namespace.unwrap(original)
