"""Creation of templates from the section ``rocketmq.*``, or from that of a further template."""

from __future__ import annotations

from collections.abc import Iterable

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import MessageTrace, TraceOf
from mqtemplate.context.settings.rocketmq import RocketMQSettings
from mqtemplate.converter import MessageConverter
from mqtemplate.template.rocketmq_template import RocketMQTemplate

_DEFAULT_GROUP = "mqtemplate-producer"


def new_template(
    kind: type[RocketMQTemplate],
    broker: Broker,
    converter: MessageConverter,
    settings: RocketMQSettings,
    trace_of: TraceOf,
    observation: Observation,
    *,
    middlewares: Iterable[object] = (),
) -> RocketMQTemplate:
    """Return a template over a broker, as the settings describe it.

    Args:
        trace_of: Returns the sender of trace records.
        observation: Measures or traces the sends.
        middlewares: Middlewares around each send, the outermost first.
    """
    producer, receiving = settings.producer, settings.pull_consumer
    if producer.enable_msg_trace:
        trace = trace_of(broker, producer.customized_trace_topic, is_cloud=settings.access_channel == "CLOUD")
        observation = MessageTrace(trace, producer.group or _DEFAULT_GROUP, broker.clock, observation)
    return kind(
        broker,
        converter=converter,
        send_message_timeout=producer.send_message_timeout,
        max_message_size=producer.max_message_size,
        producer_group=producer.group,
        consumer_group=receiving.group,
        consumer_topic=receiving.topic,
        selector_type=receiving.selector_type,
        selector_expression=receiving.selector_expression,
        message_model=receiving.message_model,
        middlewares=middlewares,
        observation=observation,
    )
