"""The listener socket behind `LocalServer`, with the processors that Spark's processes need."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.server import RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.worker_pool import HeavyWork
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.guard import AclGuard
from mqtemplate.server.acl.settings import Account, AclSettings
from mqtemplate.server.broker_server import ServerAssembly
from mqtemplate.server.local_address import LocalServerAddress
from mqtemplate.server.name_server import KVConfig, NameServer, RegisteredBrokers
from mqtemplate.server.processors.client import PendingPositionsProcessor
from mqtemplate.server.requests.registration import register
from mqtemplate.server.requests.response import problem_response
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = get_logger("mqtemplate.spark")

_LISTEN = HostAddress("127.0.0.1", 0)


class FolderServer:
    """The listener socket for one folder, with the processors that Spark's processes need."""

    def __init__(self, broker: EmbeddedBroker, store: Path) -> None:
        self._store = store
        key = secrets.token_hex()
        account = Account(access_key=f"spark-{secrets.token_hex(8)}", secret_key=key, admin=True, is_owner=True)
        clock, settings = broker.clock, BrokerServerSettings(listen=_LISTEN)
        acl = AclSettings(accounts=(account,))
        access, limits, heavy = AccessControl(acl), RemotingServerSettings(), HeavyWork()
        self._remoting = remoting = RemotingServer(
            _LISTEN, limits, clock, guard=AclGuard(access, acl, clock), error_response=problem_response, heavy=heavy
        )
        self._drain_s = limits.drain_ms / 1_000
        self._parts = parts = ServerAssembly(broker.engine, settings, access, heavy)
        processors = (parts.client, parts.offset, parts.sequenced, parts.delayed, parts.pull, parts.send_back)
        register(remoting, *processors, PendingPositionsProcessor(broker.engine.delayed))
        remoting.on_close(self._forget)
        others = RegisteredBrokers(broker.name, clock, is_open=False)
        NameServer(
            parts.core.topics, KVConfig(broker.store.store_files), others, lambda: str(remoting.address)
        ).register(remoting)
        _let_topics_be_created(broker)
        remoting.start()
        LocalServerAddress(str(remoting.address), account.access_key, os.getpid(), key).write(store)
        _log.debug("spark.server_started", address=str(remoting.address))

    def _forget(self, connection: Connection) -> None:
        self._parts.core.forget(connection.id)

    def stop(self) -> None:
        """Remove the address and close all connections."""
        LocalServerAddress.remove(self._store)
        self._remoting.stop()
        self._parts.deferred_work.close(self._drain_s)
        _log.debug("spark.server_stopped")


def _let_topics_be_created(engine: EmbeddedBroker) -> None:
    """Give clients the route by which they send to a new topic, as the broker itself creates topics."""
    if engine.settings.auto_create_topic_enable and engine.topics.config(AUTO_CREATE_TOPIC) is None:
        count = engine.settings.default_topic_queue_nums
        perm = Perm.READ | Perm.WRITE | Perm.INHERIT
        engine.topics.update(AUTO_CREATE_TOPIC, {"readQueueNums": count, "writeQueueNums": count, "perm": int(perm)})
