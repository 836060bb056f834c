"""Changes of a cluster: topics are created on its masters, our own servers get another table of delay levels."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID, RouteTable
from mqtemplate.errors import BrokerError, ConfigurationError, MessageError, UnsupportedError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.topics import AUTO_CREATE_TOPIC, check_send_topic

# --- topics ---------------------------------------------------------------------------------------


_WAIT_S = 5.0
_REPEAT_S = 0.01


def topic_queues(context: ClientContext, topic: str) -> Sequence[MessageQueue]:
    """See `Broker.queues`; of a missing topic, return the queues that its first message creates."""
    return context.routes.publish_route(check_send_topic(topic)).write_queues


def create_topic(context: ClientContext, topic: str, queue_count: int) -> None:
    """Give *topic* at least *queue_count* queues on each broker, and wait until the name servers have them.

    Raises:
        BrokerError: A broker refused, or the name servers do not have the topic in time.
    """
    check_send_topic(topic)
    if queue_count < 1:
        raise MessageError(f"a topic has 1 queue or more, got queue_count {queue_count}")
    counts = _queue_counts(context.routes, topic)
    masters = {name: by_id[MASTER_ID] for name, by_id in context.routes.brokers().items() if MASTER_ID in by_id}
    changed = [name for name in masters if counts[name] < queue_count]
    header = CreateTopicRequestHeader(
        topic=context.namespace.wrap(topic),
        default_topic=AUTO_CREATE_TOPIC,
        read_queue_nums=queue_count,
        write_queue_nums=queue_count,
        perm=Perm.READ | Perm.WRITE,
        topic_filter_type="SINGLE_TAG",
        topic_sys_flag=0,
        order=False,
    )
    for name in changed:
        request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        context.call(masters[name], request, f"create topic {topic!r}")
    _wait_for_route(context.routes, topic, queue_count, changed)


def _wait_for_route(routes: RouteTable, topic: str, queue_count: int, broker_names: list[str]) -> None:
    """Wait until the brokers have registered the topic at the name servers."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        counts = _queue_counts(routes, topic)
        if all(counts[name] >= queue_count for name in broker_names):
            return
        if time.monotonic() > deadline:
            raise BrokerError(
                f"topic {topic!r} was created on {', '.join(broker_names)}, but no name server has it after "
                f"{_WAIT_S:g} s; see that the brokers reach the name servers (namesrvAddr), and try again"
            )
        threading.Event().wait(_REPEAT_S)


def _queue_counts(routes: RouteTable, topic: str) -> Counter[str]:
    """Look up the number of queues of each broker."""
    routes.forget(topic)
    route = routes.existing(topic)
    return Counter(queue.broker_name for queue in (route.write_queues if route is not None else ()))


# --- delay levels ---------------------------------------------------------------------------------


_LEVEL_RESPONSES = (ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER)


def change_delay_levels(context: ClientContext, text: str) -> None:
    """See `RemoteBroker.change_delay_levels`."""
    masters = context.routes.masters()
    context.instance.register_at(masters)
    others = [address for address in masters if not context.instance.announced.get(address)]
    if others or not masters:
        raise UnsupportedError(
            f"the delay levels of {', '.join(others) or 'this cluster'} cannot be changed from here: a RocketMQ broker "
            "reads them at start; set messageDelayLevel in its settings and restart it"
        )
    for address in masters:
        request = RemotingCommand.request(
            RequestCode.UPDATE_BROKER_CONFIG, body=f"messageDelayLevel={' '.join(text.split())}\n".encode()
        )
        response = context.call(address, request, "change the delay levels", accept=_LEVEL_RESPONSES)
        if response.code == ResponseCode.INVALID_PARAMETER:
            raise ConfigurationError(response.remark or f"{text!r} is not a level table")
