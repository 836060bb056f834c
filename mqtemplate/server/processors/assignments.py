"""Requests for assignments, codes 400 and 401: the queues of a member whose queues the broker assigns, and the way in
which the members of a group get the messages of a topic.

Source: RocketMQ ``broker: QueryAssignmentProcessor``, ``MessageRequestModeManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.engine.group_rules import allocate_averagely, sort_client_ids
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies import group as bodies
from mqtemplate.remoting.protocol.bodies.route import TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.state.groups import RequestModes, SubscriptionGroupTable
from mqtemplate.server.state.remote_clients import RemoteClients
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.admin")

_Allocate = Callable[[str, Sequence[str], Sequence[MessageQueue]], list[MessageQueue]]


def _allocate_by_circle(member: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Return each n-th queue, of n members. Source: ``AllocateMessageQueueAveragelyByCircle``."""
    return list(queues[members.index(member) :: len(members)]) if member in members else []


_STRATEGIES: dict[str, _Allocate] = {"AVG": allocate_averagely, "AVG_BY_CIRCLE": _allocate_by_circle}


@dataclass(frozen=True, slots=True)
class AssignmentProcessor:
    """Assigns queues to members that let the broker do it (``clientRebalance=false``), and stores the modes of groups.

    Attributes:
        route: Returns the route of a topic: its queues may be on several brokers.
    """

    modes: RequestModes
    topics: TopicConfigs
    groups: SubscriptionGroupTable
    clients: ClientRegistry
    remote_clients: RemoteClients
    route: Callable[[str], TopicRouteData | None]

    @answers(RequestCode.SET_MESSAGE_REQUEST_MODE, slow=True)
    def _set_mode(self, mode: bodies.SetMessageRequestModeRequestBody, connection: Connection) -> None:
        if mode.mode not in ("PULL", "POP"):
            raise RefusedError(ResponseCode.INVALID_PARAMETER, f"mode must be PULL or POP, got {mode.mode!r:.64}")
        if mode.topic.startswith(RETRY_TOPIC_PREFIX):
            raise RefusedError(
                ResponseCode.NO_PERMISSION, "members always pull from a retry topic; set the mode of the real topic"
            )
        self.topics.get(mode.topic)
        self.groups.ensure(mode.consumer_group)  # the mode is set before the first member starts
        self.modes.put(mode)
        _log.info(
            "admin.request_mode_set",
            group=mode.consumer_group,
            topic=mode.topic,
            mode=mode.mode,
            by=str(connection.remote),
        )
        info = self.clients.consumers.get(mode.consumer_group)
        if info is not None:  # the members query their assignments at once
            self.remote_clients.notify_members(info)

    @answers(RequestCode.QUERY_ASSIGNMENT)
    def _assignment(self, query: bodies.QueryAssignmentRequestBody) -> bodies.QueryAssignmentResponseBody:
        mode = self.modes.find(query.topic, query.consumer_group)
        queues = self._queues(query.topic)
        if queues is not None and query.message_model != "BROADCASTING":
            queues = self._share(query, mode, queues)
        if queues is None:
            return bodies.QueryAssignmentResponseBody()  # the member keeps what it has
        assigned = [
            bodies.MessageQueueAssignment(message_queue=queue, mode=mode.mode) for queue in dict.fromkeys(queues)
        ]
        return bodies.QueryAssignmentResponseBody(message_queue_assignments=assigned)

    def _queues(self, topic: str) -> list[MessageQueue] | None:
        """Return the readable queues of a topic in the order of all clients; None if there is no such topic."""
        route = self.route(topic)
        if route is None:
            return None
        return [
            MessageQueue(topic, data.broker_name, queue_id)
            for data in sorted(route.queue_datas, key=lambda data: data.broker_name)
            if data.perm & Perm.READ
            for queue_id in range(data.read_queue_nums)
        ]

    def _share(
        self,
        query: bodies.QueryAssignmentRequestBody,
        mode: bodies.SetMessageRequestModeRequestBody,
        queues: list[MessageQueue],
    ) -> list[MessageQueue] | None:
        """Return the part of a member; None if the group has no connected member."""
        allocate = _STRATEGIES.get(query.strategy_name)
        if allocate is None:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"the broker assigns queues by {' or '.join(_STRATEGIES)}, got {query.strategy_name!r:.64}; set "
                "clientRebalance to true for other strategies",
            )
        info = self.clients.consumers.get(query.consumer_group)
        if info is None:
            return None
        members = sort_client_ids(info.client_ids())
        if mode.mode == "POP":
            return _pop_shares(allocate, query.client_id, members, queues, mode.pop_share_queue_num)
        return allocate(query.client_id, members, queues)


def _pop_shares(
    allocate: _Allocate, member: str, members: Sequence[str], queues: Sequence[MessageQueue], share_count: int
) -> list[MessageQueue]:
    """Return the queues that a member pops from: its own, and those of the *share_count* members after it.

    Source: ``QueryAssignmentProcessor.allocate4Pop``.
    """
    if share_count <= 0 or share_count >= len(members) - 1:
        return [MessageQueue(queue.topic, queue.broker_name, -1) for queue in queues]
    if member not in members:
        return []
    index = members.index(member)
    if len(members) > len(queues):  # each member needs a queue
        return [queues[index % len(queues)]]
    sharing = [members[(index + step) % len(members)] for step in range(share_count + 1)]
    return [queue for each in sharing for queue in allocate(each, members, queues)]
