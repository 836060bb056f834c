"""Server for the Spark processes of this machine, in the process that owns an embedded broker."""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mqtemplate.errors import SparkError

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

_running: dict[Path, tuple[Any, int]] = {}
"""Folder -> its server in this process, and the number of `LocalServer` objects that use it."""
_changing = threading.Lock()


class LocalServer:
    """Lets Spark's processes write to an embedded broker of this process, and list its pending messages.

    The sink, the pending view and the changes by DataFrame find it by the broker's folder. It listens on 127.0.0.1 and
    accepts the key in ``config/localServer.json`` only. A `SparkListenerContainer` starts one; use it as a context
    manager for writes without a listener::

        with LocalServer(broker):
            df.write.format("mqtemplate").mode("append").option("store", broker.path).save()

    Several of one folder share one server, which stops with the last of them.

    Raises:
        SparkError: The broker has no folder.
    """

    def __init__(self, broker: EmbeddedBroker) -> None:
        if broker.path is None:
            raise SparkError(
                "a broker in memory has no folder by which Spark's processes could find it; keep the broker in a "
                "folder, such as rocketmq.name-server: embedded:./data"
            )
        self._broker, self._store = broker, broker.path
        self._is_started = False

    def start(self) -> None:
        """Listen, and write the address. A second call has no effect."""
        with _changing:
            if self._is_started:
                return
            server, users = _running.get(self._store) or (self._listen(), 0)
            _running[self._store] = server, users + 1
            self._is_started = True

    def _listen(self) -> Any:
        # By name: the server's parts load only where one runs.
        module = import_module("mqtemplate.spark.location.folder_server")
        return module.FolderServer(self._broker, self._store)

    def stop(self) -> None:
        """Remove the address and close all connections, unless another one uses them. A second call has no effect."""
        with _changing:
            if not self._is_started:
                return
            self._is_started = False
            server, users = _running.pop(self._store)
            if users > 1:
                _running[self._store] = server, users - 1
            else:
                server.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
