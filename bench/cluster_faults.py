"""A cluster of RocketMQ under faults: what our client and RocketMQ's Java client lose, repeat, and fail to send.

    python -m bench.cluster_faults [--short | --our-server] [--without-java] [--pause-ms 20]

Two name servers, two masters and a replica of RocketMQ 5.5.0. Each client has a producer and two consumers, processes
of their own with the default settings of their library: a synchronous stream, an asynchronous one, and one with hash
keys, whose consumers are ORDERLY. Both clients run at the same time on the same cluster, with topics of their own, so
that each fault hits both. The faults: masters killed, stopped for ten seconds (SIGSTOP), restarted one after the other,
moved to another address; a consumer killed and replaced; queues added. It takes about twelve minutes; ``--short`` about
one. With ``--our-server`` both clients use one server of this library, which is killed, stopped and restarted.

The table: sends that failed and the longest time without a successful one; messages that were handled more than once;
the time until the messages of a broker that is back, or of the queues of a killed consumer, were handled again. Then
for the whole run: messages that were acknowledged and never handled, and first deliveries out of order for one key
in one queue.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.measure import quiet, scratch_folder
from bench.peer.fault_client import now_ms
from bench.peer.fault_cluster import FaultCluster, OurServer, RocketMQCluster
from bench.peer.jvm import command_line, unavailable_reason
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import Message, MessageQueue

QUEUES = 4
_JAVA_DEFAULTS = (  # the conformance tests set shorter ones
    "-Drocketmq.client.rebalance.waitInterval=20000",
    "-Drocketmq.client.rebalance.minInterval=1000",
    "-Drocketmq.client.rebalance.lockInterval=20000",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
)
_DRAIN_S = 90.0
_PROBE_S = 0.25
_READY_S = 60.0


class Sent(NamedTuple):
    """One send; times are epoch milliseconds."""

    is_ok: bool
    end_ms: int
    start_ms: int
    id: str


class Got(NamedTuple):
    """A message that a handler has received."""

    at_ms: int
    queue: str
    id: str


class Participant:
    """A process of one client, and the lines that it has printed."""

    def __init__(self, command: Sequence[str], folder: Path, name: str) -> None:
        self._output = folder / f"{name}.out"
        with self._output.open("wb") as output, (folder / f"{name}.err").open("wb") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        self._lines: list[str] = []
        self._offset = 0

    def lines(self) -> list[str]:
        """Return the complete lines printed so far."""
        with self._output.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        self._lines += data[:end].decode(errors="replace").splitlines()
        return self._lines

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Client:
    """One of the two libraries: its producer and its consumers, also those that were killed."""

    name: str
    start: Callable[[str, str], Participant]
    producers: list[Participant] = field(default_factory=list)
    consumers: list[Participant] = field(default_factory=list)
    _number: int = 0

    def add(self, role: str) -> Participant:
        """Start a producer or a consumer."""
        self._number += 1
        started = self.start(role, f"{self.name}-{role}-{self._number}")
        (self.producers if role == "producer" else self.consumers).append(started)
        return started

    def sends(self) -> list[Sent]:
        parts = [
            line.split(" ") for each in self.producers for line in each.lines() if line.startswith(("ok ", "fail "))
        ]
        return [Sent(kind == "ok", int(end), int(start), id_) for kind, end, start, id_ in parts]

    def deliveries(self) -> list[Got]:
        """Return what the handlers have received, by time."""
        parts = [line.split(" ") for each in self.consumers for line in each.lines() if line.startswith("got ")]
        return sorted((Got(int(at), queue, id_) for _, at, queue, id_ in parts), key=lambda got: got.at_ms)

    def has_handled(self, text: str) -> bool:
        """Return True if a recent line of a consumer contains *text*."""
        return any(text in line for each in self.consumers for line in each.lines()[-2_000:])

    def kill(self) -> None:
        for each in (*self.producers, *self.consumers):
            each.kill()


class Fault(NamedTuple):
    """One fault of the run; *back_ms* is when the broker was back, or the consumer was killed."""

    name: str
    start_ms: int
    back_ms: int
    end_ms: int
    broker: str | None


class Trial:
    """The faults, one after the other, and what each client did meanwhile."""

    def __init__(self, cluster: FaultCluster, clients: Sequence[Client], settle_s: float) -> None:
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._clients = clients
        self._settle_s = settle_s

    def run(self, away_s: float, *, is_short: bool) -> None:
        """Run all faults, or the four of the short form."""
        cluster = self._cluster
        with our_client(cluster) as broker:
            self._probe_broker = broker
            last = cluster.brokers[-1]
            self._fault(f"kill {last}", last, lambda: self._killed(last, away_s))
            self._fault(f"SIGSTOP {last}", last, lambda: self._stopped(last, away_s))
            self._fault("queues added", None, lambda: self._add_queues(broker))
            if is_short:
                self._fault("consumer added", None, self._add_consumers)
                return
            self._fault("consumer killed", None, self._replace_consumers)
            for name in cluster.brokers:
                self._fault(f"rolling restart: {name}", name, partial(self._restarted, name))
            if isinstance(cluster, RocketMQCluster):
                self._fault("kill broker-a, replica stays", "broker-a", lambda: self._killed("broker-a", 2 * away_s))
                self._fault("SIGSTOP broker-a", "broker-a", lambda: self._stopped("broker-a", away_s))
                self._fault("broker-b moved", "broker-b", lambda: cluster.move("broker-b"))

    def _fault(self, name: str, broker_name: str | None, cause: Callable[[], None]) -> None:
        start_ms = now_ms()
        cause()
        back_ms = now_ms() if broker_name is not None else start_ms
        if broker_name is not None:
            self._probe(len(self.faults), broker_name, self._settle_s)
        while now_ms() < back_ms + self._settle_s * 1_000:
            time.sleep(0.1)
        self.faults.append(Fault(name, start_ms, back_ms, now_ms(), broker_name))
        print(f"  {name}: done", file=sys.stderr, flush=True)

    def _probe(self, number: int, broker_name: str, limit_s: float) -> None:
        """Send to the queues of a broker that is back, until each client has handled one message of each topic."""
        deadline = time.monotonic() + limit_s
        awaited = {(client, kind) for client in self._clients_by_name() for kind in ("plain", "keys")}
        count = 0
        while awaited and time.monotonic() < deadline:
            for client, kind in sorted(awaited):
                message = Message(f"{client}-{kind}", f"probe/{kind}/{number}/{count}".encode())
                try:
                    self._probe_broker.sends.send(message, MessageQueue(message.topic, broker_name, 0), 1_000)
                except MQTemplateError:
                    continue  # the route does not have the broker yet
            count += 1
            time.sleep(_PROBE_S)
            awaited -= {
                (client.name, kind)
                for client in self._clients
                for kind in ("plain", "keys")
                if client.has_handled(f" probe/{kind}/{number}/")
            }

    def _clients_by_name(self) -> list[str]:
        return [client.name for client in self._clients]

    # --- causes --------------------------------------------------------------------------------

    def _killed(self, name: str, away_s: float) -> None:
        self._cluster.kill(name)
        time.sleep(away_s)
        self._cluster.start(name)

    def _stopped(self, name: str, away_s: float) -> None:
        self._cluster.pause(name)
        time.sleep(away_s)
        self._cluster.resume(name)

    def _restarted(self, name: str) -> None:
        self._cluster.stop(name)
        self._cluster.start(name)

    def _add_queues(self, broker: RemoteBroker) -> None:
        for client in self._clients_by_name():
            for kind in ("plain", "keys"):
                broker.create_topic(f"{client}-{kind}", 2 * QUEUES)

    def _add_consumers(self) -> None:
        for client in self._clients:
            client.add("consumer")

    def _replace_consumers(self) -> None:
        for client in self._clients:
            client.consumers[0].kill()
        time.sleep(1)
        for client in self._clients:
            client.add("consumer")


# --- results ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one client did during one fault, from its start to the end of the time after it."""

    failed: Counter[str]
    longest_s: dict[str, float]
    repeated: int
    resumed_s: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Totals:
    """What one client did in the whole run."""

    acknowledged: int
    failed: int
    lost: list[str]
    repeated: int
    out_of_order: int


def outcome(client: Client, fault: Fault, number: int) -> Outcome:
    """Return what *client* did during a fault."""
    sends = [sent for sent in client.sends() if fault.start_ms <= sent.end_ms < fault.end_ms]
    failed = Counter(sent.id.split("/")[0] for sent in sends if not sent.is_ok)
    longest = {stream: _longest_gap_s(sends, stream, fault) for stream in ("plain", "async", "keys")}
    seen: set[str] = set()
    repeated = 0
    for got in client.deliveries():
        if got.at_ms >= fault.end_ms:
            break
        repeated += got.id in seen and got.at_ms >= fault.start_ms
        seen.add(got.id)
    return Outcome(failed, longest, repeated, _resumed_s(client, fault, number))


def _longest_gap_s(sends: list[Sent], stream: str, fault: Fault) -> float:
    """Return the longest time between two successful sends of a stream."""
    ends = sorted(sent.end_ms for sent in sends if sent.is_ok and sent.id.startswith(stream))
    times = [fault.start_ms, *ends, fault.end_ms]
    return max(later - earlier for earlier, later in pairwise(times)) / 1_000


def _resumed_s(client: Client, fault: Fault, number: int) -> dict[str, float | None]:
    """Return by topic the time until messages of the broker that is back, or of each queue, were handled again."""
    deliveries = client.deliveries()
    result: dict[str, float | None] = {}
    for kind in ("plain", "keys"):
        if fault.broker is not None:
            found = [got.at_ms for got in deliveries if got.id.startswith(f"probe/{kind}/{number}/")]
            result[kind] = (found[0] - fault.back_ms) / 1_000 if found else None
            continue
        prefixes = ("keys/",) if kind == "keys" else ("plain/", "async/")
        mine = [got for got in deliveries if got.id.startswith(prefixes)]
        before = {got.queue for got in mine if fault.start_ms - 10_000 <= got.at_ms < fault.start_ms}
        first = {got.queue: got.at_ms for got in reversed(mine) if fault.start_ms + 100 <= got.at_ms < fault.end_ms}
        waits = [first[queue] - fault.start_ms if queue in first else None for queue in before]
        result[kind] = None if None in waits or not waits else max(wait for wait in waits if wait is not None) / 1_000
    return result


def totals(client: Client) -> Totals:
    """Return what *client* did in the whole run."""
    sends, deliveries = client.sends(), client.deliveries()
    acknowledged = {sent.id for sent in sends if sent.is_ok}
    counts = Counter(got.id for got in deliveries)
    lost = sorted(acknowledged - counts.keys())
    return Totals(
        len(acknowledged),
        sum(not sent.is_ok for sent in sends),
        lost,
        sum(counts.values()) - len(counts),
        _out_of_order(deliveries),
    )


def _out_of_order(deliveries: list[Got]) -> int:
    """Return the number of first deliveries that came after a later message of the same key in the same queue."""
    newest: dict[tuple[str, str], int] = defaultdict(lambda: -1)
    seen: set[str] = set()
    wrong = 0
    for got in deliveries:
        if not got.id.startswith("keys/") or got.id in seen:
            continue
        seen.add(got.id)
        _, key, number = got.id.split("/")
        wrong += int(number) < newest[key, got.queue]
        newest[key, got.queue] = max(newest[key, got.queue], int(number))
    return wrong


# --- the run ----------------------------------------------------------------------------------------


@contextmanager
def running_clients(cluster: FaultCluster, folder: Path, pause_ms: int, *, with_java: bool) -> Iterator[list[Client]]:
    """Start the producers and consumers, and wait until they handle messages."""

    def start_python(role: str, name: str) -> Participant:
        arguments = [role, cluster.name_servers, "python", str(pause_ms)]
        return Participant([sys.executable, "-m", "bench.peer.fault_client", *arguments], folder, name)

    def start_java(role: str, name: str) -> Participant:
        home = folder / f"{name}.home"
        home.mkdir()
        arguments = [role, cluster.name_servers, "java", str(pause_ms)]
        command = command_line("5.5.0", home, "Faults", *arguments, heap_mib=128, flags=_JAVA_DEFAULTS)
        return Participant(command, folder, name)

    clients = [Client("python", start_python)] + ([Client("java", start_java)] if with_java else [])
    with ExitStack() as stack:
        with our_client(cluster) as broker:
            for client in clients:
                for kind in ("plain", "keys"):
                    broker.create_topic(f"{client.name}-{kind}", QUEUES)
        for client in clients:
            stack.callback(client.kill)
            for role in ("consumer", "consumer", "producer"):
                client.add(role)
        _await(lambda: all(_is_running(client) for client in clients), "the clients handle messages", _READY_S)
        yield clients


def our_client(cluster: FaultCluster) -> RemoteBroker:
    return RemoteBroker(RemoteSettings(name_servers=tuple(cluster.name_servers.split(";"))))


def _is_running(client: Client) -> bool:
    """Return True if each consumer of a client has handled messages of both kinds."""
    kinds = [
        {line.split(" ")[3].split("/")[0] for line in each.lines() if line[:4] == "got "} for each in client.consumers
    ]
    return all("keys" in kind and len(kind) > 1 for kind in kinds)


def _await(is_done: Callable[[], bool], what: str, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline:
            print(f"not within {limit_s:.0f} s: {what}", file=sys.stderr, flush=True)
            return False
        threading.Event().wait(0.2)
    return True


def run_trial(
    folder: Path, *, is_short: bool, with_java: bool, pause_ms: int, on_our_server: bool = False
) -> Iterator[tuple[Client, list[Fault], list[Outcome], Totals]]:
    """Run the faults; yield each client with what it did."""
    settle_s, away_s = (10.0, 5.0) if is_short else (40.0, 10.0)
    with (
        OurServer(folder) if on_our_server else RocketMQCluster(folder, has_replica=not is_short) as cluster,
        running_clients(cluster, folder, pause_ms, with_java=with_java) as clients,
    ):
        trial = Trial(cluster, clients, settle_s)
        trial.run(away_s, is_short=is_short)
        for client in clients:
            for producer in client.producers:
                producer.kill()
        _await(lambda: not any(totals(client).lost for client in clients), "all messages are handled", _DRAIN_S)
        for client in clients:
            each = [outcome(client, fault, number) for number, fault in enumerate(trial.faults)]
            yield client, trial.faults, each, totals(client)


def print_results(client: Client, faults: list[Fault], outcomes: list[Outcome], total: Totals) -> None:
    print(f"\n{client.name}: failed sends and the longest time without a successful one; repeated; handled again after")
    print(
        f"{'fault':<30} {'plain':>12} {'async':>12} {'hash_key':>12} {'repeated':>9} {'concurrent':>11} {'ORDERLY':>9}"
    )
    for fault, each in zip(faults, outcomes, strict=True):
        sends = [f"{each.failed[stream]}, {each.longest_s[stream]:.1f} s" for stream in ("plain", "async", "keys")]
        again = ["-" if seconds is None else f"{seconds:.1f} s" for seconds in each.resumed_s.values()]
        columns = [f"{column:>12}" for column in (*sends, each.repeated, *again)]
        print(f"{fault.name:<30} {' '.join(columns)}")
    print(
        f"whole run: {total.acknowledged:,} acknowledged, {len(total.lost)} lost, {total.repeated} repeated, "
        f"{total.out_of_order} out of order, {total.failed} sends failed",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="four faults, a short time each, no replica")
    parser.add_argument("--our-server", action="store_true", help="one server of this library instead of RocketMQ")
    parser.add_argument("--without-java", action="store_true", help="only our client")
    parser.add_argument("--pause-ms", type=int, default=20, help="pause between two sends of a stream")
    arguments = parser.parse_args()
    if reason := unavailable_reason():
        sys.exit(reason)
    quiet()
    with scratch_folder() as folder:
        results = run_trial(
            folder.absolute(),
            is_short=arguments.short,
            with_java=not arguments.without_java,
            pause_ms=arguments.pause_ms,
            on_our_server=arguments.our_server,
        )
        for result in results:
            print_results(*result)


if __name__ == "__main__":
    main()
