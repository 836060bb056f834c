"""The names of the v5 client's template, and what rocketmq-spring's template sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from mqtemplate import EmbeddedBroker, RocketMQTemplate, VirtualClock

pytestmark = pytest.mark.feature("spring-v5")


@pytest.fixture
def template() -> Iterator[RocketMQTemplate]:
    with EmbeddedBroker(clock=VirtualClock()) as broker, RocketMQTemplate(broker) as template:
        yield template


def test_the_executor_runs_the_callbacks(template: RocketMQTemplate) -> None:
    threads: SimpleQueue[str] = SimpleQueue()
    with ThreadPoolExecutor(1, "shop-callbacks") as executor:
        template.setAsyncSenderExecutor(executor)
        template.async_send("orders", "a", on_success=lambda result: threads.put(threading.current_thread().name))

        assert threads.get(timeout=60).startswith("shop-callbacks")
