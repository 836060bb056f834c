"""Batches whose messages differ in their bodies and ids only, as those of most producers: read as rows of one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.columns import Rows
from mqtemplate.record.uniform_batch import BatchOrigin, UniformBatch
from mqtemplate.remoting.protocol.messages import BATCH_FRONT
from mqtemplate.server.processors.sends.sent_properties import CompleteProperties, SentProperties

_FEWEST = 8
"""Fewer messages are faster one by one."""
MOST_BYTES = 256 << 10
"""Larger bodies are read message by message: one call of numpy would hold the interpreter lock for milliseconds."""


class AlikeMessages(NamedTuple):
    """Messages of a batch, or of several.

    Attributes:
        bodies, ids: A row for each message.
        id_at: Start of the id in the encoded properties.
        properties: Those of the first message.
    """

    bodies: Rows
    ids: Rows
    id_at: int
    flag: int
    properties: CompleteProperties

    def sent_batch(
        self,
        topic: str,
        queue_id: int,
        sys_flag: int,
        born_timestamp: int,
        born_host: bytes,
        reconsume_times: int,
        origins: Sequence[BatchOrigin] = (),
    ) -> UniformBatch:
        """Return the messages for the store. The first arguments are those of `RecordDraft` for the first batch.

        Args:
            origins: Of each batch; empty for one batch.
        """
        encoded, code, _ = self.properties
        body = self.bodies[0].tobytes()
        first = RecordDraft(
            topic, queue_id, body, encoded, code, -1, self.flag, sys_flag, born_timestamp, born_host, reconsume_times
        )
        return UniformBatch(first, self.bodies, self.ids, self.id_at, origins)


def read_alike(data: bytes, sent: SentProperties) -> AlikeMessages | None:
    """Return the messages in the body of a batch, or in the bodies of several, joined.

    None if they are few or large, not alike, or not ordinary.
    """
    if not BATCH_FRONT.size <= len(data) <= MOST_BYTES:
        return None
    size, flag, body_length = BATCH_FRONT.unpack_from(data)
    body_end = BATCH_FRONT.size + body_length
    properties_at = body_end + 2
    if body_length < 0 or not properties_at < size or len(data) % size or len(data) < _FEWEST * size:
        return None
    text = data[properties_at:size]
    properties = sent.complete_encoded(text)
    if properties is None or int.from_bytes(data[body_end:properties_at], "big") != len(text):
        return None
    unique_id = properties.unique_id.encode()
    if text.count(unique_id) != 1:
        return None
    id_at = text.index(unique_id)
    ids_at, ids_end = properties_at + id_at, properties_at + id_at + len(unique_id)
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    ids, equal = rows[:, ids_at:ids_end], (rows[:, : BATCH_FRONT.size], rows[:, body_end:ids_at], rows[:, ids_end:])
    around = np.concatenate(equal, axis=1)
    if around.tobytes() != around[0].tobytes() * len(rows) or not ids.tobytes().isalnum():
        return None
    return AlikeMessages(rows[:, BATCH_FRONT.size : body_end], ids, id_at, flag, properties)
