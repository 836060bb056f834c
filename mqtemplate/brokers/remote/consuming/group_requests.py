"""Requests of a group member to brokers: the group's members, a check of selectors, and queue locks.

Source: RocketMQ ``client: MQClientAPIImpl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.errors import response_error
from mqtemplate.brokers.remote.routes import MASTER_ID
from mqtemplate.errors import BrokerError, ListenerError, RemoteConnectError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    GetConsumerListByGroupResponseBody,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader

_log = get_logger("mqtemplate.remote")

_LOCK_TIMEOUT_MS = 1_000
_LIST_TIMEOUT_MS = 1_000
_SETTLE_MS = 3_000  # members repeat the heartbeat to a lost broker each second


class MemberList(NamedTuple):
    """Client ids of the members of a group.

    Attributes:
        is_settled: False if each broker that answered had forgotten this client until a moment ago, as after a restart.
            Then other members may be missing, too.
    """

    ids: frozenset[str]
    is_settled: bool


@dataclass(eq=False)
class GroupRequests:
    """Requests of one member. They raise `BrokerError` if the broker refuses or does not answer."""

    context: ClientContext
    group: str

    def __post_init__(self) -> None:
        self.wire_group = self.context.namespace.wrap(self.group)
        self._on_replicas: set[str] = set()

    def list_members(self, topic: str) -> MemberList:
        """Return the client ids of the group's members at all masters of a topic; without a master, at the replicas.

        A restarted master has only the members whose heartbeats have arrived since, so one list alone would let a
        member take the queues of others.
        """
        masters, replicas = self._brokers_of(topic)
        found = self._member_lists(masters) if masters else {}
        if not found:
            found = self._member_lists(replicas) if replicas else {}
            self._log_replicas(topic, has_answer=bool(found))
        else:
            self._on_replicas.discard(topic)
        if not found:
            raise RemoteConnectError(
                f"get the members of group {self.group!r}: no broker of topic {topic!r} answers; see that one runs"
            )
        settled = any(self.context.instance.is_registered(address, _SETTLE_MS) for address in found)
        return MemberList(frozenset().union(*found.values()), settled)

    def _member_lists(self, addresses: list[str]) -> dict[str, list[str]]:
        """Return address -> client ids, of the brokers that answer."""
        header = ConsumerGroupRequestHeader(consumer_group=self.wire_group)
        requests = [
            (address, RemotingCommand.request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)) for address in addresses
        ]
        found: dict[str, list[str]] = {}
        refusal: BrokerError | None = None
        for address, response in self.context.instance.invoke_all(requests, _LIST_TIMEOUT_MS):
            if isinstance(response, BrokerError):
                continue
            # SYSTEM_ERROR: the broker lacks the group, as after a restart. The next heartbeat registers its members.
            if response.code == ResponseCode.SYSTEM_ERROR:
                _log.debug("remote.group_unknown", group=self.group, reason=response.remark)
                found[address] = []
            elif response.code == ResponseCode.SUCCESS:
                found[address] = GetConsumerListByGroupResponseBody.decode(response.body).consumer_id_list
            else:
                refusal = response_error(response, f"get the members of group {self.group!r}", address)
        if refusal is not None and not found:
            raise refusal
        return found

    def _log_replicas(self, topic: str, *, has_answer: bool) -> None:
        if topic not in self._on_replicas and has_answer:
            self._on_replicas.add(topic)
            _log.warning(
                "remote.masters_missing",
                group=self.group,
                topic=topic,
                reason="no master of the topic answers; its replicas are read until one does",
            )

    def check_subscription(self, topic: str, subscription: SubscriptionData) -> None:
        """Have one of the topic's masters check an SQL92 expression; tags need no check.

        Raises:
            UnsupportedError: The broker does not evaluate SQL92 expressions.
            ListenerError: It cannot parse this one.
        """
        if subscription.expression_type == "TAG" or not (masters := self._brokers_of(topic)[0]):
            return
        body = CheckClientRequestBody(
            client_id=self.context.instance.id,
            group=self.wire_group,
            subscription_data=subscription,
            namespace=self.context.settings.namespace or None,
        ).encode()
        request = RemotingCommand.request(RequestCode.CHECK_CLIENT_CONFIG, body=body)
        response = self.context.instance.invoke(masters[0], request, self.context.settings.request_timeout_ms)
        if response.code == ResponseCode.SUCCESS:
            return
        operation = f"group {self.group!r} subscribes to {topic!r} by {subscription.sub_string!r}"
        problem = response_error(response, operation, masters[0])
        if response.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise ListenerError(str(problem))
        raise UnsupportedError(f"{problem}; set enablePropertyFilter=true on the broker, or select by tags")

    def _brokers_of(self, topic: str) -> tuple[list[str], list[str]]:
        """Return the addresses of the topic's masters and of its replicas; of all brokers if the topic is missing."""
        routes = self.context.routes
        route = routes.existing(topic)
        names = routes.brokers() if route is None else route.addresses
        by_ids = [routes.brokers().get(name, {}) for name in names]
        masters = [by_id[MASTER_ID] for by_id in by_ids if MASTER_ID in by_id]
        return masters, [address for by_id in by_ids for address in by_id.values() if address not in masters]

    # --- queue locks ---------------------------------------------------------------------------

    def lock(self, queues: Mapping[str, list[MessageQueue]]) -> dict[str, set[MessageQueue] | BrokerError]:
        """Lock queues at all brokers at once.

        Args:
            queues: Broker name -> its queues.

        Returns:
            Broker name -> the queues that this member has locked now, or the error.
        """
        results: dict[str, set[MessageQueue] | BrokerError] = {}
        for broker_name, response in self._call_masters(RequestCode.LOCK_BATCH_MQ, queues, "lock").items():
            if isinstance(response, BrokerError):
                results[broker_name] = response
                continue
            locked = LockBatchResponseBody.decode(response.body).lock_ok_mq_set
            results[broker_name] = {self.context.namespace.unwrap_queue(queue) for queue in locked}
        return results

    def unlock(self, queues: Mapping[str, list[MessageQueue]]) -> None:
        """Unlock queues at all brokers at once; a failure is logged."""
        for broker_name, response in self._call_masters(RequestCode.UNLOCK_BATCH_MQ, queues, "unlock").items():
            if isinstance(response, BrokerError):
                _log.info("remote.unlock_failed", group=self.group, broker=broker_name, reason=str(response))

    def _call_masters(
        self, code: int, queues: Mapping[str, list[MessageQueue]], verb: str
    ) -> dict[str, RemotingCommand | BrokerError]:
        """Send a request to the master of each broker; a replica's locks would be unknown to the master."""
        context = self.context
        results: dict[str, RemotingCommand | BrokerError] = {}
        requests: dict[str, tuple[str, RemotingCommand]] = {}
        for broker_name, wanted in queues.items():
            body = LockBatchRequestBody(
                consumer_group=self.wire_group,
                client_id=context.instance.id,
                mq_set=[context.namespace.wrap_queue(queue) for queue in wanted],
            )
            try:
                address = context.routes.master(broker_name)
                requests[broker_name] = address, RemotingCommand.request(code, body=body.encode())
            except BrokerError as exc:
                results[broker_name] = exc
        responses = context.instance.invoke_all(requests.values(), _LOCK_TIMEOUT_MS)
        for broker_name, (address, response) in zip(requests, responses, strict=True):
            operation = f"{verb} {len(queues[broker_name])} queues of group {self.group!r}"
            if isinstance(response, RemotingCommand) and response.code != ResponseCode.SUCCESS:
                results[broker_name] = response_error(response, operation, address)
            else:
                results[broker_name] = response
        return results
