"""Measure how many messages per second RocketMQ's Python client sends synchronously. Print one line per round.

Arguments: proxy, topic, bytes per body, seconds per round, rounds. The first round is a warm-up and is not printed.

It runs in the environment of `bench.peer.python_client`. It exits when standard input is closed, so that it ends with
its parent process, and 30 s after the expected end.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from rocketmq import ClientConfiguration, Credentials, Message, Producer  # type: ignore[import-not-found]

_EXTRA_SECONDS = 30


def _exit_with_standard_input() -> None:
    while os.read(0, 1_024):
        pass
    os._exit(1)


def main(proxy: str, topic: str, body_bytes: int, seconds: float, rounds: int) -> None:
    threading.Thread(target=_exit_with_standard_input, daemon=True).start()
    faulthandler.dump_traceback_later(seconds * (rounds + 1) + _EXTRA_SECONDS, exit=True)
    body = b"x" * body_bytes
    producer = Producer(ClientConfiguration(proxy, Credentials()), (topic,))
    producer.startup()

    def send() -> None:
        message = Message()
        message.topic = topic
        message.body = body
        producer.send(message)  # Raises an error unless the broker has stored the message.

    for number in range(rounds + 1):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            send()
            count += 1
        if number:
            print(f"{count / (time.perf_counter() - start):.1f}", flush=True)
    producer.shutdown()


if __name__ == "__main__":
    _proxy, _topic, _body_bytes, _seconds, _rounds = sys.argv[1:]
    main(_proxy, _topic, int(_body_bytes), float(_seconds), int(_rounds))
    os._exit(0)  # The client's threads may still run.
