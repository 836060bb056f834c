"""Listeners over Spark Connect: the server runs their function in a process of its own, on its machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from mqtemplate.broker import Broker
from mqtemplate.errors import ListenerError
from mqtemplate.metrics import Metrics
from mqtemplate.spark.listening.batches import BatchMetrics, BatchWork, ListenerFunction
from mqtemplate.spark.listening.checkpoint import QueryCheckpoint
from mqtemplate.spark.listening.listener import SparkListenerSettings
from mqtemplate.spark.listening.redelivery import Redelivery
from mqtemplate.spark.listening.shared_broker import send_back_rows
from mqtemplate.spark.location.connection import commit_offsets, in_broker, open_broker
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.records.offsets import OffsetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class ImportedFunction:
    """Function of a listener by its module and name, so that another process can import it."""

    module: str
    name: str

    @classmethod
    def of(cls, endpoint: object, listener: str) -> ImportedFunction:
        """Return the reference to a function, or to the class of an object.

        Raises:
            ListenerError: Another process cannot import it, or cannot create an object of the class.
        """
        target: Any = endpoint if inspect.isroutine(endpoint) else type(endpoint)
        reference = cls(target.__module__, target.__qualname__)
        if reference.module == "__main__" or "<locals>" in reference.name or reference._target() is not target:
            raise ListenerError(
                f"{listener}: Spark Connect runs a listener in a process of the server, which must import it; define "
                f"{reference.name} at the top of a module that the server has too, not in {reference.module}"
            )
        if isinstance(target, type) and _needs_arguments(target):
            raise ListenerError(
                f"{listener}: Spark Connect runs a listener in a process of the server, where no services are; give "
                f"the constructor of {reference.name} no arguments, or use a function"
            )
        return reference

    def load(self) -> Callable[..., object]:
        """Import the module, and return the function."""
        target = self._target()
        function: Callable[..., object] = target if inspect.isroutine(target) else target().on_batch
        return function

    def _target(self) -> Any:
        return attrgetter(self.name)(import_module(self.module))


def _needs_arguments(target: type) -> bool:
    parameters = inspect.signature(target).parameters.values()
    return any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectBatches:
    """Function for ``foreachBatch``. Spark pickles it, and a process of the server calls it for each batch.

    Attributes:
        checkpoint: Checkpoint folder of the query, on the machine of the server.
        broker_name: Broker of the queues, if its location is a folder.
        first, replayed: See `BatchWork`.
    """

    endpoint: ImportedFunction
    name: str
    settings: SparkListenerSettings
    options: dict[str, str]
    location: BrokerLocation
    checkpoint: str
    broker_name: str
    first: OffsetTable
    replayed: int

    def __call__(self, messages: DataFrame, batch_id: int) -> None:
        """Handle a batch with a connection to the broker."""
        with open_broker(self.location) as broker:
            self._work(broker).run(messages, batch_id)

    def _work(self, broker: Broker) -> BatchWork:
        settings, metrics, folder = self.settings, Metrics(), Path(self.checkpoint)
        return BatchWork(
            listener=ListenerFunction(
                name=self.name, function=self.endpoint.load(), settings=settings, options=self.options
            ),
            checkpoint=QueryCheckpoint(folder, self.broker_name),
            first=self.first,
            replayed=self.replayed,
            redelivery=Redelivery(broker, send_back_rows(broker), metrics, self.name, settings, folder),
            metrics=BatchMetrics(metrics, settings.consumer_group),
            commit=partial(self._commit, broker),
            wait=Event().wait,
        )

    def _commit(self, broker: Broker, end: OffsetTable) -> None:
        end = end if self.location.store is None else in_broker(broker.name, end)
        commit_offsets(broker, self.settings.consumer_group, end)
