"""Two events, one in each content mode, sent to a listener that takes both."""

from __future__ import annotations

import threading

from mqtemplate import MQApplication, RocketMQTemplate, message_listener

from .converter import CloudEvent, CloudEventConverter

received: list[CloudEvent] = []
arrived = threading.Semaphore(0)


@message_listener("shop-events", "audit", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
def note(event: CloudEvent) -> None:
    received.append(event)
    arrived.release()


def send_both(template: RocketMQTemplate) -> None:
    """Send an event with the template of the application, and one with a template of the other mode."""
    order = CloudEvent(type="shop.order.paid", source="/shop", subject="order 7", data={"id": 7, "amount": 30})
    template.sync_send("shop-events", order)
    RocketMQTemplate(template.broker, converter=CloudEventConverter("structured")).sync_send("shop-events", order)
    for _ in range(2):
        arrived.acquire()
    for event in received:
        print(f"{event.type} of {event.source}: {event.data}")


def main() -> None:
    """Run the example."""
    settings = {"rocketmq.name-server": "embedded:memory"}
    MQApplication(note, CloudEventConverter("binary"), settings=settings).run(send_both)
