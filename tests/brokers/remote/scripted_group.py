"""Consumer groups of a scripted broker: members, locks, and offset commits that are applied late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Timer

from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from mqtemplate.remoting.protocol.headers.group import (
    ConsumerGroupRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UnregisterClientRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from tests.brokers.remote.scripted_cluster import ScriptedBroker

OffsetTable = dict[int, int]


class ScriptedGroups:
    """The consumer groups of one broker.

    A commit behaves as in ``ConsumerOffsetManager.commitOffset`` of RocketMQ 5.5.0 when another thread interrupts it at
    the worst moment: it looks up the offset table of its topic and group when it arrives, and stores its offset
    *commit_delay_s* later. If there was no table at the lookup, it stores a new one, over any other.

    Attributes:
        tables: (topic, group) -> queue id -> committed offset.
        members: Group -> client ids.
        heartbeat_delay_s: Time from the arrival of a heartbeat until it registers its members.
        unapplied_heartbeats: Number of heartbeats within that time.
        unapplied_at: For each unregistration and unlock: how many commits had arrived and were not applied yet.
    """

    def __init__(self, broker: ScriptedBroker, commit_delay_s: float = 0.05) -> None:
        self.tables: dict[tuple[str, str], OffsetTable] = {}
        self.members: dict[str, list[str]] = {}
        self.unapplied_at: dict[str, int] = {}
        self.unapplied_heartbeats = 0
        self.heartbeat_delay_s = 0.0
        self._commit_delay_s = commit_delay_s
        self._unapplied = 0
        self._lock = Lock()
        broker.script(RequestCode.HEART_BEAT, self._heartbeat)
        broker.script(RequestCode.UNREGISTER_CLIENT, self._unregister)
        broker.script(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.list_members)
        broker.script(RequestCode.QUERY_CONSUMER_OFFSET, self._query_offset)
        broker.script(RequestCode.UPDATE_CONSUMER_OFFSET, self.commit)
        broker.script(
            RequestCode.GET_MIN_OFFSET, lambda request: request.response(header=OffsetResponseHeader(offset=0))
        )
        broker.script(RequestCode.PULL_MESSAGE, self._find_nothing)
        broker.script(RequestCode.LOCK_BATCH_MQ, self._lock_queues)
        broker.script(RequestCode.UNLOCK_BATCH_MQ, self._unlock_queues)

    def _heartbeat(self, request: RemotingCommand) -> Future[RemotingCommand]:
        self.unapplied_heartbeats += 1
        return _later(self.heartbeat_delay_s, lambda: self._register(request))

    def _register(self, request: RemotingCommand) -> RemotingCommand:
        heartbeat = HeartbeatData.decode(request.body)
        for consumer in heartbeat.consumer_data_set:
            ids = self.members.setdefault(consumer.group_name, [])
            if heartbeat.client_id not in ids:
                ids.append(heartbeat.client_id)
        self.unapplied_heartbeats -= 1
        return request.response()

    def _unregister(self, request: RemotingCommand) -> RemotingCommand:
        header = request.header(UnregisterClientRequestHeader)
        if header.consumer_group is not None:
            self.unapplied_at["unregistration"] = self._unapplied
            ids = self.members.get(header.consumer_group, [])
            self.members[header.consumer_group] = [each for each in ids if each != header.client_id]
        return request.response()

    def list_members(self, request: RemotingCommand) -> RemotingCommand:
        ids = self.members.get(request.header(ConsumerGroupRequestHeader).consumer_group, [])
        return request.response(body=GetConsumerListByGroupResponseBody(consumer_id_list=ids).encode())

    def _query_offset(self, request: RemotingCommand) -> RemotingCommand:
        header = request.header(QueryConsumerOffsetRequestHeader)
        offset = self.tables.get((header.topic, header.consumer_group), {}).get(header.queue_id)
        if offset is None:
            return request.response(ResponseCode.QUERY_NOT_FOUND, remark="the group has no offset")
        return request.response(header=OffsetResponseHeader(offset=offset))

    def commit(self, request: RemotingCommand) -> Future[RemotingCommand]:
        """Apply a commit after the delay."""
        header = request.header(UpdateConsumerOffsetRequestHeader)
        key = (header.topic, header.consumer_group)
        with self._lock:
            self._unapplied += 1
            found = self.tables.get(key)

        def apply() -> RemotingCommand:
            with self._lock:
                table = {} if found is None else found
                table[header.queue_id] = header.commit_offset
                self.tables[key] = table
                self._unapplied -= 1
            return request.response()

        return _later(self._commit_delay_s, apply)

    @staticmethod
    def _find_nothing(request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(PullMessageRequestHeader)
        if header.suspend_timeout_millis:
            return None
        offset = header.queue_offset
        found = PullMessageResponseHeader(
            suggest_which_broker_id=0, next_begin_offset=offset, min_offset=0, max_offset=offset
        )
        return request.response(ResponseCode.PULL_NOT_FOUND, header=found)

    @staticmethod
    def _lock_queues(request: RemotingCommand) -> RemotingCommand:
        queues = LockBatchRequestBody.decode(request.body).mq_set
        return request.response(body=LockBatchResponseBody(lock_ok_mq_set=queues).encode())

    def _unlock_queues(self, request: RemotingCommand) -> RemotingCommand:
        self.unapplied_at["unlock"] = self._unapplied
        return request.response()


def _later(delay_s: float, action: Callable[[], RemotingCommand]) -> Future[RemotingCommand]:
    """Run *action* after a delay, in another thread; the future gets its result."""
    response: Future[RemotingCommand] = Future()
    Timer(delay_s, lambda: response.set_result(action())).start()
    return response
