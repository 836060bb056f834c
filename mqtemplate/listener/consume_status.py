"""The status that a handler may return."""

from enum import Enum


class ConsumeStatus(Enum):
    """Status that a handler may return. Returning None means ``CONSUME_SUCCESS``, raising ``RECONSUME_LATER``."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"
