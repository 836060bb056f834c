"""An application with a store folder: a delayed message survives a restart and arrives, and old files are deleted."""

import sys
from pathlib import Path

from mqtemplate import MQApplication, VirtualClock, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import MQTemplateError
from mqtemplate.store.files.disk_files import DiskFileQueue
from mqtemplate.testing import Harness

root = Path(sys.argv[1])
clock = VirtualClock()
received = []


@message_listener(topic="orders", consumer_group="billing")
def bill(text: str) -> None:
    received.append(text)


def application() -> MQApplication:
    return MQApplication(bill, settings={"rocketmq.name-server": f"embedded:{root}"}, clock=clock)


with application() as app:
    app.template.sync_send("orders", "level", delay_level=5)
    app.template.sync_send("orders", "timer", delay="3h")
    app.template.sync_send("orders", "line\r\nends", delay="2m")
    try:
        EmbeddedBroker(root).start()
    except MQTemplateError as error:
        print("second broker:", type(error).__name__)
with application() as app:
    Harness(app).advance("4h")
assert sorted(received) == ["level", "line\r\nends", "timer"], received
with application() as app:
    Harness(app).advance("1h")
assert len(received) == 3, received
print("received:", *sorted(map(repr, received)))

queue = DiskFileQueue(root / "queue", 4_096)
for number in range(3):
    queue.append_file().write(0, b"%d" % number)
queue.flush(0, queue.end)
reader = memoryview(queue.files[0].view)  # an open map, as of a pull in another thread
try:
    queue.delete_before(2 * 4_096)
except MQTemplateError as error:
    print("mapped:", type(error).__name__, *sorted(path.name[-5:] for path in queue.folder.iterdir()))
reader.release()
queue.delete_before(2 * 4_096)
print("files:", *sorted(path.name[-5:] for path in queue.folder.iterdir()))
queue.close()
