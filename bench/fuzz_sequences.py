"""Sequences of valid requests in a senseless order: heartbeats, locks, transactions, queries, pulls, administration.

`bench.fuzz` damages single frames. Here each request is valid, and the sequence is not: a transaction is ended twice or
by another group, a lock is released by another client, a topic is deleted between a send and its pull, a consumer
unregisters while its pull is held. Positions come from the responses before. Each request must get a response, and none
of them an unexpected exception. Another client sends to its own topic all the time; it shares the interpreter with the
attackers, so its times are an upper bound.

    python -m bench.fuzz_sequences [--seconds 60] [--seed 1] [--clients 8]
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.fuzz import process_mib, server_process
from bench.measure import percentile, report, run
from bench.other_client import other_client
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress, MessageQueue, parse_offset_msg_id
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, LockBatchRequestBody, ProducerData
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.headers import admin, group, message
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.protocol.messages import encode_properties_text
from mqtemplate.server import BrokerServer, BrokerServerSettings

_TIMEOUT_MS = 20_000
_UNEXPECTED = re.compile(r"[A-Za-z_]+(Error|Exception|Exit|Interrupt): ")
"""Remark of the response to a request whose processor raised an unexpected exception; see `system_error`."""


@dataclass
class Outcome:
    """Results of all requests."""

    codes: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    unexpected: list[str] = field(default_factory=list)
    hanging: list[str] = field(default_factory=list)
    sent_us: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # errors of the other client

    def add_other(self, took_us: float, response: RemotingCommand | BrokerError) -> None:
        """Record a send of the other client."""
        self.sent_us.append(took_us)
        if isinstance(response, BrokerError) or response.code != ResponseCode.SUCCESS:
            self.lost.append(str(response))


class Client:
    """A client that sends random requests, one after the other; the same seed yields the same choices."""

    def __init__(self, address: HostAddress, seed: int, outcome: Outcome) -> None:
        self._address = str(address)
        self._random = random.Random(seed)
        self._outcome = outcome
        self._client = RemotingClient(RemotingClientSettings(), SystemClock())
        self._halves: list[tuple[int, int]] = []  # queue offset and physical offset
        self._stored: list[int] = [0]  # physical offsets
        self._steps: list[Callable[[], None]] = [
            self._send,
            self._send,
            self._heartbeat,
            self._heartbeat,
            self._lock,
            self._half,
            self._half,
            self._end,
            self._end,
            self._pull,
            self._pull,
            self._send_back,
            self._query,
            self._offsets,
            self._unregister,
            self._administer,
        ]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def step(self) -> None:
        """Send the requests of one step; now and then over a new connection."""
        if self._random.random() < 0.01:
            self._client.close()
            self._client = RemotingClient(RemotingClientSettings(), SystemClock())
        self._random.choice(self._steps)()

    # --- names: few, so that clients meet -------------------------------------------------------------

    def _topic(self) -> str:
        return self._random.choice(
            ("orders", "invoices", "orders", "%RETRY%billing", "new", "RMQ_SYS_TRANS_HALF_TOPIC")
        )

    def _group(self) -> str:
        return self._random.choice(("billing", "shipping", "producers", "billing"))

    def _client_id(self) -> str:
        return f"client@{self._random.randrange(6)}"

    def _queue_id(self) -> int:
        return self._random.choice((0, 1, 2, 3, 3, 99, -1))

    # --- requests -------------------------------------------------------------------------------------

    def _invoke(self, code: RequestCode, header: CommandHeader | None = None, body: bytes = b"") -> RemotingCommand:
        request = RemotingCommand.request(code, header, body)
        self._outcome.codes[code] += 1
        try:
            response = self._client.invoke(self._address, request, _TIMEOUT_MS)
        except BrokerError as exc:
            self._outcome.hanging.append(f"{code.name}: {exc}")
            return request.response(ResponseCode.SYSTEM_ERROR)
        if response.code != ResponseCode.SUCCESS:
            self._outcome.refused += 1
            if _UNEXPECTED.match(response.remark or ""):
                self._outcome.unexpected.append(f"{code.name}: {response.remark}")
        return response

    def _send_message(self, properties: dict[str, str], sys_flag: int = 0) -> RemotingCommand:
        header = message.SendMessageRequestHeaderV2(
            producer_group=self._group(),
            topic=self._topic(),
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=self._queue_id(),
            sys_flag=sys_flag,
            born_timestamp=SystemClock().now_ms(),
            flag=0,
            properties=encode_properties_text(properties),
        )
        return self._invoke(RequestCode.SEND_MESSAGE_V2, header, b"x" * self._random.choice((0, 10, 1_000)))

    def _send(self) -> None:
        delays = ({}, {}, {"DELAY": "1"}, {"TIMER_DELAY_MS": "200"}, {"DELAY": "99"}, {"DELAY": "x"})
        response = self._send_message({"KEYS": f"k{self._random.randrange(9)}"} | self._random.choice(delays))
        if response.code == ResponseCode.SUCCESS:
            stored = response.header(message.SendMessageResponseHeader)
            self._stored = [*self._stored[-20:], parse_offset_msg_id(stored.msg_id)[1]]

    def _half(self) -> None:
        group_name = self._group()
        response = self._send_message({"TRAN_MSG": "true", "PGROUP": group_name, "UNIQ_KEY": "0A"}, sys_flag=4)
        if response.code == ResponseCode.SUCCESS:
            stored = response.header(message.SendMessageResponseHeader)
            self._halves = [*self._halves[-20:], (stored.queue_offset, parse_offset_msg_id(stored.msg_id)[1])]

    def _end(self) -> None:
        """End a transaction: an open one, one that has ended, one of another group, or none."""
        queue_offset, physical_offset = self._random.choice(self._halves or [(0, 0)])
        header = message.EndTransactionRequestHeader(
            producer_group=self._group(),
            tran_state_table_offset=queue_offset + self._random.choice((0, 0, 0, 1, -1)),
            commit_log_offset=self._random.choice((physical_offset, physical_offset, 7)),
            commit_or_rollback=self._random.choice((8, 12, 0, 5)),
            msg_id="0A",
        )
        self._invoke(RequestCode.END_TRANSACTION, header)

    def _heartbeat(self) -> None:
        subscriptions = [
            SubscriptionData(
                topic=self._topic(),
                sub_string=self._random.choice(("*", "a || b", "a > 1", "a >")),
                expression_type=self._random.choice(("TAG", "SQL92")),
                sub_version=self._random.randrange(3),
            )
            for _ in range(self._random.randrange(3))
        ]
        consumer = ConsumerData(
            group_name=self._group(),
            message_model=self._random.choice(("CLUSTERING", "BROADCASTING")),
            subscription_data_set=subscriptions,
        )
        heartbeat = HeartbeatData(
            client_id=self._client_id(),
            consumer_data_set=[consumer] * self._random.randrange(3),
            producer_data_set=[ProducerData(group_name=self._group())],
            without_sub=self._random.random() < 0.2,
        )
        self._invoke(RequestCode.HEART_BEAT, None, heartbeat.encode())

    def _lock(self) -> None:
        queues = [MessageQueue(self._topic(), "broker-a", self._queue_id()) for _ in range(self._random.randrange(5))]
        body = LockBatchRequestBody(consumer_group=self._group(), client_id=self._client_id(), mq_set=queues)
        self._invoke(self._random.choice((RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ)), None, body.encode())

    def _pull(self) -> None:
        header = message.PullMessageRequestHeader(
            consumer_group=self._group(),
            topic=self._topic(),
            queue_id=self._queue_id(),
            queue_offset=self._random.choice((0, 0, 1, 5, -1, 1 << 40)),
            max_msg_nums=self._random.choice((1, 32, 0, -1, 1 << 30)),
            sys_flag=self._random.randrange(8),
            commit_offset=self._random.choice((0, 3, -1)),
            suspend_timeout_millis=self._random.choice((0, 50, -1)),
            subscription=self._random.choice((None, "*", "a > 1", "a")),
            sub_version=self._random.randrange(3),
            expression_type=self._random.choice((None, "TAG", "SQL92")),
        )
        self._invoke(RequestCode.PULL_MESSAGE, header)

    def _send_back(self) -> None:
        header = message.ConsumerSendMsgBackRequestHeader(
            offset=self._random.choice(self._stored) + self._random.choice((0, 0, 0, 1)),
            group=self._group(),
            delay_level=self._random.choice((0, 1, -1, 99)),
            max_reconsume_times=self._random.choice((None, 0, 16)),
        )
        self._invoke(RequestCode.CONSUMER_SEND_MSG_BACK, header)

    def _query(self) -> None:
        by_key = message.QueryMessageRequestHeader(
            topic=self._topic(),
            key=f"k{self._random.randrange(9)}",
            max_num=self._random.choice((1, 64, -1)),
            begin_timestamp=0,
            end_timestamp=self._random.choice((0, 1 << 62)),
        )
        self._invoke(RequestCode.QUERY_MESSAGE, by_key)
        self._invoke(
            RequestCode.VIEW_MESSAGE_BY_ID, message.ViewMessageRequestHeader(offset=self._random.choice(self._stored))
        )

    def _offsets(self) -> None:
        names = {"topic": self._topic(), "queue_id": self._queue_id()}
        search = group.SearchOffsetRequestHeader(**names, timestamp=self._random.choice((0, -1, 1 << 62)))  # type: ignore[arg-type]
        self._invoke(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search)
        commit = group.UpdateConsumerOffsetRequestHeader(
            consumer_group=self._group(),
            commit_offset=self._random.choice((0, 9, -1, 1 << 62)),
            **names,  # type: ignore[arg-type]
        )
        self._invoke(RequestCode.UPDATE_CONSUMER_OFFSET, commit)

    def _unregister(self) -> None:
        header = group.UnregisterClientRequestHeader(
            client_id=self._client_id(), producer_group=self._group(), consumer_group=self._group()
        )
        self._invoke(RequestCode.UNREGISTER_CLIENT, header)

    def _administer(self) -> None:
        """Delete a topic or a group in use, or reset an offset."""
        topic = self._random.choice(("new", "new", "invoices"))
        choice = self._random.randrange(3)
        if choice == 0:
            self._invoke(RequestCode.DELETE_TOPIC_IN_BROKER, admin.TopicNameRequestHeader(topic=topic))
        elif choice == 1:
            header = group.DeleteSubscriptionGroupRequestHeader(group_name=self._group(), clean_offset=True)
            self._invoke(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
        else:
            reset = group.ResetOffsetRequestHeader(topic=topic, group=self._group(), timestamp=0, is_force=True)
            self._invoke(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)


# --- the run ----------------------------------------------------------------------------------------------


def _other_send() -> RemotingCommand:
    header = message.SendMessageRequestHeaderV2(
        producer_group="other",
        topic="other",
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )
    return RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, header, b"x")


def attack(address: HostAddress, options: argparse.Namespace, outcome: Outcome) -> None:
    """Let the clients send, each in a thread, for a time."""
    end = time.monotonic() + options.seconds

    def work(number: int) -> None:
        client = Client(address, options.seed * 1_000 + number, outcome)
        while time.monotonic() < end and not outcome.hanging:
            client.step()
        client.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve() -> None:
    """Run a broker on a new folder, print its address, and stop at a signal."""
    logging.disable(logging.CRITICAL)  # a warning per refused request would slow the bench
    anywhere = HostAddress("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as folder:
        engine = EmbeddedBroker(Path(folder), EmbeddedSettings(listen_host=anywhere, transaction_timeout_ms=500))
        with engine, BrokerServer(engine, BrokerServerSettings(listen=anywhere)) as server:
            print(server.address, flush=True)
            signal.sigwait({signal.SIGTERM, signal.SIGINT})


def measure(options: argparse.Namespace) -> None:
    outcome = Outcome()
    with server_process("bench.fuzz_sequences") as (address, pid):
        before = process_mib(pid)
        with other_client(address, _other_send, 0.02, outcome.add_other):
            attack(address, options, outcome)
        grown = process_mib(pid) - before
        stop_start = time.monotonic()
    stop_s = time.monotonic() - stop_start
    total = sum(outcome.codes.values())
    print(
        f"{total:,} requests of {len(outcome.codes)} codes (seed {options.seed}), {outcome.refused:,} were refused",
        flush=True,
    )
    report("requests without a response", len(outcome.hanging), "", "0")
    report("unexpected exceptions", len(outcome.unexpected), "", "0")
    report("failed sends of another client", len(outcome.lost), "", "0")
    report("sends of another client, p50", percentile(outcome.sent_us, 0.5), "us", "none")
    report("sends of another client, p99", percentile(outcome.sent_us, 0.99), "us", "none")
    report("memory of the server grew by", grown, "MiB", "none")
    report("time to stop", stop_s, "s", "none")
    for line in (*outcome.hanging[:3], *sorted(set(outcome.unexpected))[:10], *outcome.lost[:3]):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    else:
        measure(options)


if __name__ == "__main__":
    run(main)
