"""Middlewares: code around each call of a handler and each send. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.middlewares.circuit_breaker import CircuitBreaker
    from mqtemplate.middlewares.declaration import MIDDLEWARE_ATTRIBUTE, middleware
    from mqtemplate.middlewares.deduplication import Deduplication
    from mqtemplate.middlewares.delivery import Delivery, ListenerInfo
    from mqtemplate.middlewares.outgoing import Outgoing
    from mqtemplate.middlewares.pause import PauseListener
    from mqtemplate.middlewares.rate_limit import RateLimit
    from mqtemplate.middlewares.time_limit import TimeLimit, TimeLimitError
    from mqtemplate.middlewares.timing import Timing

__all__ = [
    "MIDDLEWARE_ATTRIBUTE",
    "CircuitBreaker",
    "Deduplication",
    "Delivery",
    "ListenerInfo",
    "Outgoing",
    "PauseListener",
    "RateLimit",
    "TimeLimit",
    "TimeLimitError",
    "Timing",
    "middleware",
]

__getattr__ = late_import(
    __name__,
    {
        "CircuitBreaker": "mqtemplate.middlewares.circuit_breaker",
        "Deduplication": "mqtemplate.middlewares.deduplication",
        "Delivery": "mqtemplate.middlewares.delivery",
        "ListenerInfo": "mqtemplate.middlewares.delivery",
        "MIDDLEWARE_ATTRIBUTE": "mqtemplate.middlewares.declaration",
        "Outgoing": "mqtemplate.middlewares.outgoing",
        "PauseListener": "mqtemplate.middlewares.pause",
        "RateLimit": "mqtemplate.middlewares.rate_limit",
        "TimeLimit": "mqtemplate.middlewares.time_limit",
        "TimeLimitError": "mqtemplate.middlewares.time_limit",
        "Timing": "mqtemplate.middlewares.timing",
        "middleware": "mqtemplate.middlewares.declaration",
    },
)
