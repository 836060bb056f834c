"""The way of a call: wrappers around each send and each call of a handler. Names are imported when they are used.

A send is a `SendCall`, a call of a handler is a `HandlerCall`. Middlewares, metrics, spans and message traces are
wrappers.
"""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.calls.deduplication import Deduplication
    from mqtemplate.calls.handling import Delivery, HandlerCall, ListenerInfo, Observation
    from mqtemplate.calls.middlewares import MIDDLEWARE_ATTRIBUTE, middleware
    from mqtemplate.calls.pauses import CircuitBreaker, PauseListener, RateLimit
    from mqtemplate.calls.send import Outgoing, SendCall, SendKind
    from mqtemplate.calls.time_limit import TimeLimit, TimeLimitError
    from mqtemplate.calls.timing import Timing

__all__ = [
    "MIDDLEWARE_ATTRIBUTE",
    "CircuitBreaker",
    "Deduplication",
    "Delivery",
    "HandlerCall",
    "ListenerInfo",
    "Observation",
    "Outgoing",
    "PauseListener",
    "RateLimit",
    "SendCall",
    "SendKind",
    "TimeLimit",
    "TimeLimitError",
    "Timing",
    "middleware",
]

__getattr__ = late_import(
    __name__,
    {
        "CircuitBreaker": "mqtemplate.calls.pauses",
        "Deduplication": "mqtemplate.calls.deduplication",
        "Delivery": "mqtemplate.calls.handling",
        "HandlerCall": "mqtemplate.calls.handling",
        "ListenerInfo": "mqtemplate.calls.handling",
        "MIDDLEWARE_ATTRIBUTE": "mqtemplate.calls.middlewares",
        "Observation": "mqtemplate.calls.handling",
        "Outgoing": "mqtemplate.calls.send",
        "PauseListener": "mqtemplate.calls.pauses",
        "RateLimit": "mqtemplate.calls.pauses",
        "SendCall": "mqtemplate.calls.send",
        "SendKind": "mqtemplate.calls.send",
        "TimeLimit": "mqtemplate.calls.time_limit",
        "TimeLimitError": "mqtemplate.calls.time_limit",
        "Timing": "mqtemplate.calls.timing",
        "middleware": "mqtemplate.calls.middlewares",
    },
)
