"""Committed offsets of an embedded broker."""

from __future__ import annotations

from urllib.parse import quote

from mqtemplate.broker import ConsumerSpec, MessageModel
from mqtemplate.services import AfterChangeService
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import ConsumerOffsets


class CommittedOffsets:
    """The offset tables: one for all clustering groups, and one for each member of a broadcasting group.

    Attributes:
        clustering: The table of all clustering groups, in RocketMQ's file.
        service: Writes changed tables after an interval.
    """

    def __init__(self, store: MessageStore, interval_ms: int) -> None:
        self._store = store
        self.service = AfterChangeService("broker.offsets", self.persist, store.clock, interval_ms)
        self.clustering = ConsumerOffsets(store.store_files, store.clock, flush=store.flush)
        self.clustering.on_change(self.service.changed)
        self._broadcasting: dict[tuple[str, str], ConsumerOffsets] = {}

    def table(self, spec: ConsumerSpec) -> ConsumerOffsets:
        """Return the table that a member of a group uses."""
        if spec.message_model is MessageModel.CLUSTERING:
            return self.clustering
        key = (spec.instance_name, spec.group)
        if key not in self._broadcasting:
            name = f"broadcast/{_file_name(spec.instance_name, '@+')}/{_file_name(spec.group, '%|')}.json"
            table = ConsumerOffsets(self._store.store_files, self._store.clock, name, self._store.flush)
            table.load()
            table.on_change(self.service.changed)
            self._broadcasting[key] = table
        return self._broadcasting[key]

    def persist(self) -> None:
        """Write the changed tables."""
        for table in (self.clustering, *self._broadcasting.values()):
            table.persist()


def _file_name(name: str, safe: str) -> str:
    """Return *name* as the name of one file. The offsets of a remote broker have the same form."""
    quoted = quote(name, safe=safe)
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted
