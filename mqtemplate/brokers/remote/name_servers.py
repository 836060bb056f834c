"""Requests to the name servers of a cluster.

Source: RocketMQ ``client: MQClientAPIImpl``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from mqtemplate.brokers.remote.errors import check_response
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.errors import RemoteConnectError, RemoteTimeoutError
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo, TopicRouteData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader

_Invoke = Callable[[str, RemotingCommand, int], RemotingCommand]
"""Sends a request and waits: ``(address, request, timeout_ms)``; see `RemotingClient.invoke`."""


class NameServers:
    """The name servers of a cluster. Requests go to the server that answered last, until it fails.

    The requests raise `BrokerError` if no name server answers, or it refuses.
    """

    def __init__(self, addresses: Sequence[str], invoke: _Invoke, timeout_ms: int, namespace: Namespace) -> None:
        self._addresses = random.sample(addresses, len(addresses))  # spreads the clients over the servers
        self._invoke_at = invoke
        self._timeout_ms = timeout_ms
        self._namespace = namespace
        self._current = 0

    def topic_route(self, topic: str, *, in_namespace: bool = True) -> TopicRouteData | None:
        """Return the route of a topic; None if the cluster does not have it."""
        wire_topic = self._namespace.wrap(topic) if in_namespace else topic
        header = GetRouteInfoRequestHeader(topic=wire_topic, accept_standard_json_only=True)
        response, address = self._invoke(lambda: RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header))
        if response.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        return TopicRouteData.decode(check_response(response, f"get the route of topic {wire_topic!r}", address).body)

    def cluster_info(self) -> ClusterInfo:
        """Return all brokers of the cluster."""
        response, address = self._invoke(lambda: RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO))
        return ClusterInfo.decode(check_response(response, "get the brokers of the cluster", address).body)

    def _invoke(self, create_request: Callable[[], RemotingCommand]) -> tuple[RemotingCommand, str]:
        """Return the first response, and the address of the server.

        Args:
            create_request: Returns the request; a request object belongs to one attempt.

        Raises:
            RemoteConnectError: No name server answers.
        """
        problems: list[str] = []
        for step in range(len(self._addresses)):
            index = (self._current + step) % len(self._addresses)
            address = self._addresses[index]
            try:
                response = self._invoke_at(address, create_request(), self._timeout_ms)
            except (RemoteConnectError, RemoteTimeoutError) as exc:
                problems.append(str(exc))
                continue
            self._current = index
            return response, address
        raise RemoteConnectError(
            f"no name server answers ({'; '.join(problems)}); see that one is running at "
            f"{', '.join(sorted(self._addresses))}, and that rocketmq.name-server names it"
        )
