"""The status that a handler may return, and the state of a listener."""

from enum import Enum


class ConsumeStatus(Enum):
    """Status that a handler may return. Returning None means ``CONSUME_SUCCESS``, raising ``RECONSUME_LATER``."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


class ContainerState(Enum):
    """State of a listener container."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BROKEN = "broken"  # the broker was closed before the container, or its polling thread has ended
