"""RocketMQ's delayed messages for Python: a template, decorated listeners, an embedded durable broker, Spark.

The names in ``__all__`` are the public API. Further public packages: `mqtemplate.context` (for starters),
`mqtemplate.spark` (sessions, the data source) and `mqtemplate.testing` (virtual time, recorded messages).
"""

import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036  # in a clone, where no pip has read requires-python
    raise ImportError(f"mqtemplate needs Python 3.11 or newer, this is Python {sys.version.split()[0]}")

from mqtemplate import errors
from mqtemplate.exports import load_export

if TYPE_CHECKING:
    from mqtemplate.broker import Broker, ConsumeFromWhere, MessageModel
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.grpc.broker import GrpcBroker
    from mqtemplate.brokers.grpc.settings import GrpcSettings
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
    from mqtemplate.calls.handling import Delivery
    from mqtemplate.calls.middlewares import middleware
    from mqtemplate.calls.pauses import CircuitBreaker, Deduplication, PauseListener, RateLimit
    from mqtemplate.calls.send import Outgoing
    from mqtemplate.calls.timing import TimeLimit, Timing
    from mqtemplate.clock import Clock, SystemClock, VirtualClock
    from mqtemplate.context import (
        AppSettings,
        MQApplication,
        Named,
        Section,
        Value,
        ext_consumer,
        ext_template,
        load_settings,
        service,
    )
    from mqtemplate.converter import JsonMessageConverter, MessageConverter
    from mqtemplate.durations import DelayLevel
    from mqtemplate.engine.settings import EmbeddedSettings
    from mqtemplate.errors import MQTemplateError
    from mqtemplate.futures import AwaitableFuture
    from mqtemplate.listener import (
        Backoff,
        BatchFailure,
        ConsumeMode,
        ConsumeStatus,
        DeadLetter,
        Depends,
        MessageRequestMode,
        PreparedConsumer,
        RetryLater,
        Send,
        current_message,
        listener_enhancer,
        message_listener,
        on_tag,
        publishes,
    )
    from mqtemplate.message import Message, MessageExt, MessageQueue
    from mqtemplate.pending import (
        ConditionalSend,
        OnPending,
        PendingCounts,
        PendingDecision,
        PendingMessage,
        PendingOutcome,
        PendingPage,
        PendingState,
        ScheduleChange,
        ScheduleChangeStatus,
    )
    from mqtemplate.results import SendResult, SendStatus, TransactionSendResult, TransactionState
    from mqtemplate.scheduling import CatchUp, ScheduledRun, Schedules, scheduled
    from mqtemplate.selectors.tags import SelectorType
    from mqtemplate.spark import SparkBatch, spark_listener
    from mqtemplate.store.settings import FlushDiskType
    from mqtemplate.template import RocketMQTemplate, transaction_listener


__all__ = [
    # the application
    "MQApplication",
    "service",
    "Value",
    "Section",
    "Named",
    "AppSettings",
    "load_settings",
    # several templates and clusters
    "ext_template",
    "ext_consumer",
    # sending
    "RocketMQTemplate",
    "Message",
    "SendResult",
    "SendStatus",
    "AwaitableFuture",
    "MessageConverter",
    "JsonMessageConverter",
    # in transactions
    "transaction_listener",
    "TransactionState",
    "TransactionSendResult",
    # delayed messages
    "DelayLevel",
    "ScheduleChange",
    "ScheduleChangeStatus",
    "PendingPage",
    "PendingMessage",
    "PendingCounts",
    "OnPending",
    "PendingDecision",
    "PendingOutcome",
    "PendingState",
    "ConditionalSend",
    # receiving
    "message_listener",
    "on_tag",
    "listener_enhancer",
    "PreparedConsumer",
    "MessageExt",
    "MessageQueue",
    "ConsumeMode",
    "MessageRequestMode",
    "ConsumeStatus",
    "BatchFailure",
    "Backoff",
    "RetryLater",
    "DeadLetter",
    "PauseListener",
    "current_message",
    "Depends",
    "Send",
    "publishes",
    "ConsumeFromWhere",
    "MessageModel",
    "SelectorType",
    # around handlers and sends
    "middleware",
    "Delivery",
    "Outgoing",
    "Timing",
    "Deduplication",
    "TimeLimit",
    "RateLimit",
    "CircuitBreaker",
    # schedules
    "scheduled",
    "ScheduledRun",
    "Schedules",
    "CatchUp",
    # in batches, with Spark
    "spark_listener",
    "SparkBatch",
    # brokers
    "Broker",
    "EmbeddedBroker",
    "EmbeddedSettings",
    "RemoteBroker",
    "RemoteSettings",
    "GrpcBroker",
    "GrpcSettings",
    "FlushDiskType",
    # time
    "Clock",
    "SystemClock",
    "VirtualClock",
    # errors
    "MQTemplateError",
    "errors",
]

__version__ = "0.1.0"

_MODULES = {
    # where each public name is defined; it is imported with its first use, since some are expensive
    "broker": ["Broker", "ConsumeFromWhere", "MessageModel"],
    "brokers": ["EmbeddedBroker", "EmbeddedSettings", "GrpcBroker", "GrpcSettings", "RemoteBroker", "RemoteSettings"],
    "clock": ["Clock", "SystemClock", "VirtualClock"],
    "context": [
        "AppSettings",
        "MQApplication",
        "Named",
        "Section",
        "Value",
        "ext_consumer",
        "ext_template",
        "load_settings",
        "service",
    ],
    "converter": ["JsonMessageConverter", "MessageConverter"],
    "durations": ["DelayLevel"],
    "errors": ["MQTemplateError"],
    "futures": ["AwaitableFuture"],
    "listener": [
        "Backoff",
        "BatchFailure",
        "ConsumeMode",
        "ConsumeStatus",
        "DeadLetter",
        "Depends",
        "MessageRequestMode",
        "RetryLater",
        "PreparedConsumer",
        "Send",
        "current_message",
        "listener_enhancer",
        "message_listener",
        "on_tag",
        "publishes",
    ],
    "message": ["Message", "MessageExt", "MessageQueue"],
    "calls.handling": ["Delivery"],
    "calls.middlewares": ["middleware"],
    "calls.pauses": ["CircuitBreaker", "Deduplication", "PauseListener", "RateLimit"],
    "calls.send": ["Outgoing"],
    "calls.timing": ["TimeLimit", "Timing"],
    "pending": [
        "ConditionalSend",
        "OnPending",
        "PendingCounts",
        "PendingDecision",
        "PendingMessage",
        "PendingOutcome",
        "PendingPage",
        "PendingState",
        "ScheduleChange",
        "ScheduleChangeStatus",
    ],
    "results": ["SendResult", "SendStatus", "TransactionSendResult", "TransactionState"],
    "scheduling": ["CatchUp", "ScheduledRun", "Schedules", "scheduled"],
    "selectors.tags": ["SelectorType"],
    "spark": ["SparkBatch", "spark_listener"],
    "store.settings": ["FlushDiskType"],
    "template": ["RocketMQTemplate", "transaction_listener"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = load_export(__name__, _MODULE_OF[name], name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
