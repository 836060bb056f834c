"""Uniform batches: messages that differ in bodies and ids only, read as rows of one array.

`mqtemplate.server.fast_path` draws the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mqtemplate.engine.drafts import SendOrigin
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.columns import Rows
from mqtemplate.record.properties_template import AddedProperties, CompleteProperties, PropertiesTemplate
from mqtemplate.record.record_arrays import BatchOrigin, UniformBatch
from mqtemplate.remoting.protocol.messages import BATCH_FRONT

_FEWEST_UNIFORM = 8
"""Fewer messages are faster one by one."""
MAX_UNIFORM_BYTES = 256 << 10
"""Larger bodies are read message by message: one call of numpy would hold the interpreter lock for milliseconds."""


class UniformMessages(NamedTuple):
    """Messages of a batch, or of several.

    Attributes:
        bodies, ids: A row for each message.
        id_at: Start of the id in the encoded properties.
        properties: Properties of the first message.
    """

    bodies: Rows
    ids: Rows
    id_at: int
    flag: int
    properties: CompleteProperties

    def batch(self, topic: str, queue_id: int, origin: SendOrigin, batches: Sequence[BatchOrigin] = ()) -> UniformBatch:
        """Return the messages for the store.

        Args:
            origin: Of the first batch.
            batches: Queue and time of birth of each batch; empty for one batch.
        """
        encoded, code, _ = self.properties
        first = RecordDraft(topic, queue_id, self.bodies[0].tobytes(), encoded, code, self.flag, *origin)
        return UniformBatch(first, self.bodies, self.ids, self.id_at, batches)


def read_uniform(data: bytes, added: AddedProperties) -> UniformMessages | None:
    """Return the messages in the body of a batch, or in the bodies of several, joined.

    None if they are few or large, not uniform, or not ordinary.
    """
    if not BATCH_FRONT.size <= len(data) <= MAX_UNIFORM_BYTES:
        return None
    # If all messages are as the first one, they have its size. The producer wrote the lengths, perhaps
    # wrong or negative: nothing is sliced before they add up.
    size, flag, body_length = BATCH_FRONT.unpack_from(data)
    body_end = BATCH_FRONT.size + body_length
    properties_at = body_end + 2  # after their length, an i2
    if body_length < 0 or not properties_at < size or len(data) % size or len(data) < _FEWEST_UNIFORM * size:
        return None
    text = data[properties_at:size]
    properties = added.complete_encoded(text)
    if properties is None or int.from_bytes(data[body_end:properties_at], "big") != len(text):
        return None
    unique_id = properties.unique_id.encode()
    template = PropertiesTemplate.around(text, unique_id)
    if template is None:
        return None
    id_at = template.id_at
    ids_at, ids_end = properties_at + id_at, properties_at + id_at + len(unique_id)
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    ids, equal = rows[:, ids_at:ids_end], (rows[:, : BATCH_FRONT.size], rows[:, body_end:ids_at], rows[:, ids_end:])
    around = np.concatenate(equal, axis=1)
    # Bytes are compared at once, which is faster than an array of booleans. An id of letters and digits has no
    # separator, so no message has a property that the first one does not have.
    if around.tobytes() != around[0].tobytes() * len(rows) or not ids.tobytes().isalnum():
        return None
    return UniformMessages(rows[:, BATCH_FRONT.size : body_end], ids, id_at, flag, properties)
