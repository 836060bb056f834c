"""RocketMQ's delayed messages for Python: a template, decorated listeners, an embedded durable broker, Spark.

The names in ``__all__`` are the public API. Further public packages: `mqtemplate.context` (for starters),
`mqtemplate.spark` (sessions, the data source) and `mqtemplate.testing` (virtual time, recorded messages).
"""

from mqtemplate import errors
from mqtemplate.exports import load_export
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtemplate.broker import Broker
    from mqtemplate.broker import ConsumeFromWhere
    from mqtemplate.broker import MessageModel
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
    from mqtemplate.calls.deduplication import Deduplication
    from mqtemplate.calls.handling import Delivery
    from mqtemplate.calls.middlewares import middleware
    from mqtemplate.calls.pauses import CircuitBreaker
    from mqtemplate.calls.pauses import PauseListener
    from mqtemplate.calls.pauses import RateLimit
    from mqtemplate.calls.send import Outgoing
    from mqtemplate.calls.timing import TimeLimit
    from mqtemplate.calls.timing import Timing
    from mqtemplate.clock import Clock
    from mqtemplate.clock import SystemClock
    from mqtemplate.clock import VirtualClock
    from mqtemplate.context import AppSettings
    from mqtemplate.context import MQApplication
    from mqtemplate.context import Named
    from mqtemplate.context import Section
    from mqtemplate.context import Value
    from mqtemplate.context import ext_consumer
    from mqtemplate.context import ext_template
    from mqtemplate.context import load_settings
    from mqtemplate.context import service
    from mqtemplate.converter import JsonMessageConverter
    from mqtemplate.converter import MessageConverter
    from mqtemplate.durations import DelayLevel
    from mqtemplate.engine.settings import EmbeddedSettings
    from mqtemplate.errors import MQTemplateError
    from mqtemplate.futures import AwaitableFuture
    from mqtemplate.listener import Backoff
    from mqtemplate.listener import BatchFailure
    from mqtemplate.listener import ConsumeMode
    from mqtemplate.listener import ConsumeStatus
    from mqtemplate.listener import DeadLetter
    from mqtemplate.listener import Depends
    from mqtemplate.listener import PreparedConsumer
    from mqtemplate.listener import RetryLater
    from mqtemplate.listener import Send
    from mqtemplate.listener import current_message
    from mqtemplate.listener import listener_enhancer
    from mqtemplate.listener import message_listener
    from mqtemplate.listener import on_tag
    from mqtemplate.listener import publishes
    from mqtemplate.message import Message
    from mqtemplate.message import MessageExt
    from mqtemplate.message import MessageQueue
    from mqtemplate.pending import PendingCounts
    from mqtemplate.pending import PendingMessage
    from mqtemplate.pending import PendingPage
    from mqtemplate.pending import ScheduleChange
    from mqtemplate.pending import ScheduleChangeStatus
    from mqtemplate.results import SendResult
    from mqtemplate.results import SendStatus
    from mqtemplate.results import TransactionSendResult
    from mqtemplate.results import TransactionState
    from mqtemplate.scheduling import CatchUp
    from mqtemplate.scheduling import ScheduledRun
    from mqtemplate.scheduling import Schedules
    from mqtemplate.scheduling import scheduled
    from mqtemplate.selectors.tags import SelectorType
    from mqtemplate.spark import SparkBatch
    from mqtemplate.spark import spark_listener
    from mqtemplate.store import FlushDiskType
    from mqtemplate.template import RocketMQTemplate
    from mqtemplate.template import transaction_listener


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
    # receiving
    "message_listener",
    "on_tag",
    "listener_enhancer",
    "PreparedConsumer",
    "MessageExt",
    "MessageQueue",
    "ConsumeMode",
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
    "brokers": ["EmbeddedBroker", "EmbeddedSettings", "RemoteBroker", "RemoteSettings"],
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
    "calls.deduplication": ["Deduplication"],
    "calls.handling": ["Delivery"],
    "calls.middlewares": ["middleware"],
    "calls.pauses": ["CircuitBreaker", "PauseListener", "RateLimit"],
    "calls.send": ["Outgoing"],
    "calls.timing": ["TimeLimit", "Timing"],
    "pending": ["PendingCounts", "PendingMessage", "PendingPage", "ScheduleChange", "ScheduleChangeStatus"],
    "results": ["SendResult", "SendStatus", "TransactionSendResult", "TransactionState"],
    "scheduling": ["CatchUp", "ScheduledRun", "Schedules", "scheduled"],
    "selectors.tags": ["SelectorType"],
    "spark": ["SparkBatch", "spark_listener"],
    "store": ["FlushDiskType"],
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
