"""JSON bodies: our own classes, and pydantic models that read and write the same text, in microseconds per body.

Both use the same parser and the same writer for fastjson's dialect; only the step between JSON's values and objects
differs. The pydantic models accept what fastjson accepts as far as pydantic supports it by configuration: a number may
be text, and null is the same as missing. Not the rest: a boolean for a number, null in a list, a number beyond 64 bits,
a message queue as a key. Each of these would take a validator of our own. The time to import pydantic is printed too.

    python -m bench.json_body [--count 2000]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from bench.measure import report, run
from mqtemplate.remoting.protocol.bodies import json_body
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerData,
    ConsumerOffsetSerializeWrapper,
    HeartbeatData,
    ProducerData,
)
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.bodies.route import BrokerData, QueueData, SubscriptionData, TopicRouteData

_ROUNDS = 15


class Model(BaseModel):
    """Base of the pydantic models: names in camel case, unknown names ignored, null is as good as missing."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if value is not None} if type(values) is dict else values

    def encode(self) -> bytes:
        """Return the body as text: fields are declared, and so written, in alphabetical order as Java does it."""
        return json_body.dumps(self.model_dump(by_alias=True, exclude_none=True)).encode()


class PProducerData(Model):
    group_name: str


class PSubscriptionData(Model):
    class_filter_mode: bool = False
    code_set: list[int] = Field(default_factory=list)
    expression_type: str = "TAG"
    sub_string: str = "*"
    sub_version: int = 0
    tags_set: list[str] = Field(default_factory=list)
    topic: str


class PConsumerData(Model):
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    consume_type: str = "CONSUME_PASSIVELY"
    group_name: str
    message_model: str = "CLUSTERING"
    subscription_data_set: list[PSubscriptionData] = Field(default_factory=list)
    unit_mode: bool = False


class PHeartbeatData(Model):
    client_id: str = Field(alias="clientID")
    consumer_data_set: list[PConsumerData] = Field(default_factory=list)
    heartbeat_fingerprint: int = 0
    producer_data_set: list[PProducerData] = Field(default_factory=list)
    without_sub: bool = False


class PQueueData(Model):
    broker_name: str
    perm: int = 6
    read_queue_nums: int
    topic_sys_flag: int = 0
    write_queue_nums: int


class PBrokerData(Model):
    broker_addrs: dict[int, str]
    broker_name: str
    cluster: str | None = None
    enable_acting_master: bool = False


class PTopicRouteData(Model):
    broker_datas: list[PBrokerData]
    filter_server_table: dict[str, list[str]] = Field(default_factory=dict)
    order_topic_conf: str | None = None
    queue_datas: list[PQueueData]


class PDataVersion(Model):
    counter: int = 0
    state_version: int = 0
    timestamp: int = 0


class PConsumerOffsetSerializeWrapper(Model):
    data_version: PDataVersion | None = None
    offset_table: dict[str, dict[int, int]] = Field(default_factory=dict)


def heartbeat() -> HeartbeatData:
    """A client with two consumer groups of three topics each and two producer groups."""
    topics = [SubscriptionData(topic=f"topic-{n}", tags_set=["a", "b"], code_set=[97, 98]) for n in range(3)]
    consumers = [ConsumerData(group_name=f"group-{n}", subscription_data_set=topics) for n in range(2)]
    producers = [ProducerData(group_name=f"group-{n}") for n in range(2)]
    return HeartbeatData(client_id="10.0.0.1@7#1", producer_data_set=producers, consumer_data_set=consumers)


def route() -> TopicRouteData:
    """A topic on two brokers."""
    names = ("broker-a", "broker-b")
    return TopicRouteData(
        queue_datas=[QueueData(broker_name=name, read_queue_nums=8, write_queue_nums=8) for name in names],
        broker_datas=[
            BrokerData(cluster="c", broker_name=name, broker_addrs={0: "10.0.0.1:10911", 1: "10.0.0.2:10911"})
            for name in names
        ],
    )


def offsets() -> ConsumerOffsetSerializeWrapper:
    """All offsets of a broker with 100 groups of 8 queues."""
    return ConsumerOffsetSerializeWrapper(
        offset_table={f"topic-{n}@group-{n}": {queue: 123_456 + queue for queue in range(8)} for n in range(100)}
    )


def time_us(work: Callable[[], object], count: int) -> float:
    """Return microseconds of processor time per call: the best of several rounds, since other processes disturb."""
    return min(timeit.repeat(work, number=count, repeat=_ROUNDS, timer=time.process_time)) / count * 1e6


def import_ms(statements: str) -> float:
    """Return the milliseconds that *statements* take in a new process: the best of several."""
    code = f"import time; start = time.perf_counter()\n{statements}\nprint(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(9)]
    return min(float(done.stdout) for done in runs) * 1e3


def compare(body: JsonBody, model: type[Model], count: int) -> None:
    name, text = type(body).__name__, body.encode()
    same = model.model_validate(json_body.loads(text))
    assert same.encode() == text, "both write the same text"
    times = max(count // (1 + len(text) // 500), 10)
    report(f"{name}: read, our classes", time_us(lambda: type(body).decode(text), times), "us", "none")
    read_us = time_us(lambda: model.model_validate(json_body.loads(text)), times)
    report(f"{name}: read, pydantic", read_us, "us", "none")
    report(f"{name}: write, our classes", time_us(body.encode, times), "us", "none")
    report(f"{name}: write, pydantic", time_us(same.encode, times), "us", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000)
    count = parser.parse_args().count
    compare(heartbeat(), PHeartbeatData, count)
    compare(route(), PTopicRouteData, count)
    compare(offsets(), PConsumerOffsetSerializeWrapper, count)
    report("import of pydantic alone", import_ms("import pydantic"), "ms", "none")


if __name__ == "__main__":
    run(main)
