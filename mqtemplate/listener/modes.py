"""The words of consuming: how messages are handed out, and what a handler may say about them."""

from __future__ import annotations

from enum import Enum


class ConsumeMode(Enum):
    """How the messages of one listener are handed out.

    ``CONCURRENTLY``: many at a time, in no promised order; one that fails comes again later, through the retry topic.
    ``ORDERLY``: each queue one message after the other; one that fails is tried again before its successors.
    """

    CONCURRENTLY = "CONCURRENTLY"
    ORDERLY = "ORDERLY"


class ConsumeStatus(Enum):
    """What a handler may return; returning nothing means ``CONSUME_SUCCESS``, raising means ``RECONSUME_LATER``."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"
