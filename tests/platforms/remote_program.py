"""A client of a broker that runs as a server."""

import sys
import threading

from mqtemplate import MQApplication, message_listener

received: list[str] = []
all_received = threading.Event()


@message_listener(topic="orders", consumer_group="billing")
def bill(text: str) -> None:
    received.append(text)
    if len(received) == 3:
        all_received.set()


with MQApplication(bill, settings={"rocketmq.name-server": sys.argv[1]}) as app:
    app.template.sync_send("orders", "now")
    app.template.sync_send("orders", "later", delay="10ms")
    app.template.async_send("orders", "x" * 100_000).result()
    all_received.wait()
print("received:", *sorted(text[:5] for text in received))
