"""Records of one queue as bytes, whatever they were read from: the input of the Arrow parser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mqtemplate.message import MessageQueue

MAX_ROWS = 8_192  # of a block; from here to 32,768 rows the time per row is the same
MAX_BYTES = 32 * 1024 * 1024  # of a block; bodies may be megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBlock:
    """Records of one queue in ascending order, at most `MAX_ROWS` and, except for one record, `MAX_BYTES`.

    Attributes:
        data: Bytes that contain the records; other records may lie between them.
        at: Position in *data* of each record.
        sizes: Bytes of each record.
        queue_offsets: Queue offset of each record.
        physical_offsets: Position of each record in the commit log, in bytes.
        source: File or broker that the bytes come from, for errors.
    """

    queue: MessageQueue
    data: npt.NDArray[np.uint8]
    at: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    queue_offsets: npt.NDArray[np.int64]
    physical_offsets: npt.NDArray[np.int64]
    source: Path | str
