"""Codes 41 and 42: ordered consumers take queues, and give them back.

Source: RocketMQ ``broker: RebalanceLockManager``, ``AdminBrokerProcessor``; section 12.4 of the specification.
"""

from __future__ import annotations

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.bodies.group import LockBatchRequestBody, LockBatchResponseBody
from mqtemplate.remoting.server import Processor
from mqtemplate.server.queue_locks import QueueLocks


class LockProcessor:
    """Speaks for `QueueLocks`."""

    def __init__(self, locks: QueueLocks) -> None:
        self._locks = locks

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {RequestCode.LOCK_BATCH_MQ: self._lock, RequestCode.UNLOCK_BATCH_MQ: self._unlock}

    def _lock(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = LockBatchRequestBody.decode(request.body)
        owned = self._locks.lock(asked.consumer_group, asked.client_id, asked.mq_set)
        return request.response(body=LockBatchResponseBody(lock_ok_mq_set=owned).encode())

    def _unlock(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        asked = LockBatchRequestBody.decode(request.body)
        self._locks.unlock(asked.consumer_group, asked.client_id, asked.mq_set)
        return None if request.is_one_way else request.response()
