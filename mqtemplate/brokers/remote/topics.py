"""Topics of a cluster: made on its masters, seen by way of its name servers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import check_answer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import MASTER_ID, RouteTable, TopicRoute
from mqtemplate.errors import BrokerError, MessageError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, check_send_topic

_PATIENCE_S = 5.0
_GLANCE_S = 0.01


class RemoteTopics:
    """Looks topics up and makes them."""

    def __init__(self, instance: ClientInstance, routes: RouteTable, namespace: Namespace, timeout_ms: int) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._timeout_ms = timeout_ms

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Where messages may go; of a topic that is not there, the queues that its first message makes."""
        return self._routes.publish(check_send_topic(topic)).publish

    def create(self, topic: str, queue_count: int) -> None:
        """Give *topic* so many queues on each broker; one that has more keeps them. Known when this returns.

        Raises:
            BrokerError: A broker refused, or the name servers do not hear of it.
        """
        check_send_topic(topic)
        if queue_count < 1:
            raise MessageError(f"a topic has 1 queue or more, got queue_count {queue_count}")
        self._routes.forget(topic)
        there = _queue_counts(self._routes.existing(topic))
        wanting = [name for name, by_id in self._routes.brokers().items() if MASTER_ID in by_id]
        wanting = [name for name in wanting if there[name] < queue_count]
        for broker_name in wanting:
            self._create_on(self._routes.address(broker_name), topic, queue_count)
        self._wait_until_known(topic, queue_count, wanting)

    def _create_on(self, address: str, topic: str, queue_count: int) -> None:
        header = CreateTopicRequestHeader(
            topic=self._namespace.wrap(topic),
            default_topic=AUTO_CREATE_TOPIC,
            read_queue_nums=queue_count,
            write_queue_nums=queue_count,
            perm=Perm.READ | Perm.WRITE,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
        )
        request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        check_answer(self._instance.invoke(address, request, self._timeout_ms), f"make topic {topic!r}", address)

    def _wait_until_known(self, topic: str, queue_count: int, broker_names: list[str]) -> None:
        """Brokers tell name servers of their topics in their own time."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self._routes.forget(topic)
            there = _queue_counts(self._routes.existing(topic))
            if all(there[name] >= queue_count for name in broker_names):
                return
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"topic {topic!r} was made on {', '.join(broker_names)}, but no name server tells of it after "
                    f"{_PATIENCE_S:g} s; see that the brokers reach the name servers (namesrvAddr), and try again"
                )
            threading.Event().wait(_GLANCE_S)


def _queue_counts(route: TopicRoute | None) -> Counter[str]:
    return Counter(queue.broker_name for queue in (route.publish if route is not None else ()))
