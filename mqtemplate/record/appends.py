"""Records that are appended together, and their positions once the commit log has assigned them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

if TYPE_CHECKING:  # a client imports this module, but needs no numpy
    import numpy as np
    from numpy.typing import NDArray


class PutResult(NamedTuple):
    """Position of a stored record."""

    physical_offset: int
    size: int
    queue_offset: int
    store_timestamp: int

    @property
    def end(self) -> int:
        """Physical offset after the record, for `MessageStore.confirm`."""
        return self.physical_offset + self.size


class PutBatch(Sequence[PutResult]):
    """Positions of adjacent records. They are kept as columns, which saves an object for each record.

    Attributes:
        physical_offsets: Of each record, as are queue offsets and sizes.
        end: Physical offset after the last record, for `MessageStore.confirm`.
    """

    __slots__ = ("end", "physical_offsets", "queue_offsets", "sizes", "store_timestamp")

    def __init__(
        self, physical_offsets: Sequence[int], sizes: Sequence[int], queue_offsets: Sequence[int], store_timestamp: int
    ) -> None:
        self.physical_offsets = physical_offsets
        self.sizes = sizes
        self.queue_offsets = queue_offsets
        self.store_timestamp = store_timestamp
        self.end = physical_offsets[-1] + sizes[-1]

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> PutResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PutResult]: ...
    def __getitem__(self, index: int | slice) -> PutResult | Sequence[PutResult]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return PutResult(
            self.physical_offsets[index], self.sizes[index], self.queue_offsets[index], self.store_timestamp
        )


class QueueRows(NamedTuple):
    """Records of one append that go to one queue, in the order of the queue.

    Attributes:
        rows: Their numbers in the append.
    """

    topic: str
    queue_id: int
    rows: Sequence[int] | NDArray[np.intp]


class IndexEntries(NamedTuple):
    """Entries for the index: one for each appended record, or for several adjacent ones.

    Attributes:
        offsets, ends: Physical offsets of the first record of each entry, and after its last one.
        counts: Numbers of records.
        properties: Encoded properties of all records of each entry, joined; empty if they are not indexed.
    """

    offsets: Iterable[int]
    ends: Iterable[int]
    counts: Iterable[int]
    topics: Sequence[str]
    properties: Sequence[bytes]


class NewRecords(Protocol):
    """Records that the commit log appends together: all of them or none. Together they must fit into one file.

    The implementations are `Drafts`, `UniformBatch` and `ReleasedCopies`. For one record a `RecordDraft` is enough.
    """

    def __len__(self) -> int: ...

    def queues(self) -> Sequence[QueueRows]:
        """Return the queues of the records; a queue may occur several times, and has its records in this order."""

    def encode_at(
        self, queue_offsets: Sequence[int], physical_offset: int, store_timestamp: int, store_host: bytes
    ) -> tuple[bytes | memoryview, PutBatch]:
        """Return the adjacent records, and their positions.

        Args:
            queue_offsets: Of the first record of each of `queues`.
            physical_offset: Of the first record.

        Raises:
            MessageError: The properties of a record exceed `layout.MAX_PROPERTIES_BYTES`.
        """

    def tags_codes(self, store_timestamp: int) -> list[int] | NDArray[np.int64]:
        """Return the value for the consume queue unit of each record."""

    def index_entries(self, puts: PutBatch) -> IndexEntries | None:
        """Return the entries for the index; None if it shall read the records from the log."""
