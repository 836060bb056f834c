"""The program: start the application, send one message, wait for its delivery, and print the times."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from mqtemplate import DelayLevel, MQApplication

from .schedule_listener import Arrival, ArrivalBook, ScheduleListener
from .schedule_message_service import ScheduleMessageService

HERE = Path(__file__).parent
COMPONENTS = (ScheduleMessageService, ScheduleListener, ArrivalBook)

TIMEOUT_MS = int(os.environ.get("SCHEDULE_APP_TIMEOUT_MS", "100"))
DELAY_LEVEL = DelayLevel.S10  # the third of the broker's levels: ten seconds
MAX_WAIT_S = 60


def main() -> int:
    """Run the example.

    Returns:
        The exit code: 0 if the message arrived, 1 if it did not, 130 after Ctrl-C.
    """
    code = MQApplication(*COMPONENTS, config_folder=HERE).run(send_and_wait)
    if code is None:
        print("Stopped before the message was due. It is stored, and will be delivered after the next start.")
        return 130
    return code


def send_and_wait(service: ScheduleMessageService, book: ArrivalBook) -> int:
    """Send a message and wait for it. The application injects the arguments by their types."""
    uuid = str(uuid4())
    result = service.send_sync_schedule_message(uuid, "hello" + uuid, TIMEOUT_MS, DELAY_LEVEL)
    print(f"Sent 'hello{uuid}' with delay level {DELAY_LEVEL}: {result.send_status.name}. Waiting for it ...")
    if not book.wait_for(uuid, MAX_WAIT_S):
        print(f"It did not arrive within {MAX_WAIT_S} s.")
        return 1
    for line in report(book.arrivals):
        print(line)
    return 0


def report(arrivals: Iterable[Arrival]) -> list[str]:
    """Return the times of each message. There are several if an earlier run was stopped before its delivery."""
    lines = []
    for arrival in arrivals:
        lines += [
            f"{arrival.text!r}, key {arrival.keys}",
            f"  sent      {clock_time(arrival.sent_ms)}",
            f"  due       {clock_time(arrival.due_ms)}",
            f"  received  {clock_time(arrival.received_ms)}, {arrival.late_ms} ms late",
        ]
    return lines


def clock_time(epoch_ms: int) -> str:
    """Return the local time of day, to the millisecond."""
    return datetime.fromtimestamp(epoch_ms / 1_000).astimezone().strftime("%H:%M:%S.%f")[:-3]
