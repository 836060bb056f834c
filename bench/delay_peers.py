"""Lateness and cancels of delayed messages: this broker, and products of others that run on this machine, one by one.

Each gets the same work: messages that fall due one after the other, one consumer, and an idle machine. Printed are:

- lateness, the time at which the consumer has the message minus its due time; a negative one is early;
- the race of cancels: each message is cancelled at a random time, from shortly before its due time until the product
  has released most messages of the first part. The answer of the cancel is compared with what the consumer got.

Settings are the defaults, except where the line of the product says so. A product whose program or package is missing
is left out. Debian has redis-server and postgresql; PyPI has nats-py, celery, redis, dramatiq, procrastinate and
psycopg; nats-server 2.14 is ``go install github.com/nats-io/nats-server/v2@v2.14.9``, and is found by ``NATS_SERVER``
or in the path. Debian's own nats-server 2.9 has no delayed messages.

    python -m bench.delay_peers [MESSAGES] [MESSAGES A SECOND] [PRODUCT]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Protocol

from bench.measure import percentile, quiet, scratch_folder
from bench.peer.rocketmq import free_port
from tests.outbox.postgres import binaries, postgres_server
from tests.server.process import BrokerProcess
from tests.starters.redis_server import PROGRAM, redis_server
from tests.waiting import eventually

TOPIC = "delayed"
LEAD_MS = 4_000
WARM_UP = 20
IDLE_S = 12
RACES = 300


class Product(Protocol):
    """One way to send delayed messages, with a consumer that runs."""

    title: str

    def send(self, number: int, due_ms: int) -> None:
        """Send a message."""

    def cancel(self, number: int) -> bool | None:
        """Cancel it. Return what the answer says; None if there is no answer, or no cancel."""


class Runs:
    """Times at which the consumer had the messages, in epoch milliseconds."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}

    def add(self, number: int) -> None:
        """Note a message."""
        self.times.setdefault(number, []).append(time.time() * 1_000)


# --- this broker --------------------------------------------------------------------------------


class Ours:
    """A template and a listener: of an embedded broker in a folder, or over the wire to our server."""

    def __init__(self, title: str, name_server: str, runs: Runs) -> None:
        from mqtemplate import MQApplication, message_listener

        @message_listener(TOPIC, "bench")
        def on_message(message: bytes) -> None:
            runs.add(int(message))

        self.title = title
        self._keys: dict[int, str] = {}
        self.application = MQApplication(
            on_message, settings={"rocketmq.name-server": name_server, "mqtemplate.logging.enabled": False}
        )

    def send(self, number: int, due_ms: int) -> None:
        result = self.application.template.sync_send(TOPIC, str(number), deliver_at=due_ms)
        assert result.handle is not None
        self._keys[number] = result.handle

    def cancel(self, number: int) -> bool | None:
        from mqtemplate import ScheduleChangeStatus

        return self.application.template.cancel(self._keys[number]).status is ScheduleChangeStatus.CANCELLED


@contextlib.contextmanager
def embedded(runs: Runs) -> Iterator[Product]:
    with scratch_folder() as folder:
        ours = Ours("mqtemplate, embedded in a folder", f"embedded:{folder.absolute()}/store", runs)
        with ours.application:
            yield ours


@contextlib.contextmanager
def our_server(runs: Runs) -> Iterator[Product]:
    with scratch_folder() as folder, BrokerProcess(folder.absolute()) as broker:
        ours = Ours("mqtemplate, our server", str(broker.name_server), runs)
        with ours.application:
            yield ours


# --- asyncio, for the clients that need it ------------------------------------------------------


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Awaitable[Any]) -> Any:
        """Run a coroutine there, and return its result."""

        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def stop(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


# --- NATS ---------------------------------------------------------------------------------------


class Nats:
    """A schedule for each message, in a stream on disk; `cancel` purges the subject of the schedule."""

    def __init__(self, title: str, client: Any, loop: Loop) -> None:
        self.title = title
        self._client, self._loop = client, loop

    def send(self, number: int, due_ms: int) -> None:
        at = datetime.fromtimestamp(due_ms / 1_000, UTC).isoformat(timespec="milliseconds")
        headers = {"Nats-Schedule": f"@at {at}", "Nats-Schedule-Target": f"due.{number}"}
        stream = self._client.jetstream()
        self._loop.call(stream.publish(f"later.{number}", str(number).encode(), headers=headers))

    def cancel(self, number: int) -> bool | None:
        purge = json.dumps({"filter": f"later.{number}"}).encode()
        answer = self._loop.call(self._client.request("$JS.API.STREAM.PURGE.bench", purge, timeout=10))
        return bool(json.loads(answer.data)["purged"])


def answers(port: int) -> bool:
    """Return True if a server listens there."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def nats(runs: Runs) -> Iterator[Product]:
    program = os.environ.get("NATS_SERVER") or shutil.which("nats-server")
    if program is None:
        raise ImportError("nats-server")
    client_package = importlib.import_module("nats")
    found = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    port, loop = free_port(), Loop()
    with scratch_folder() as folder:
        command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: answers(port), "NATS is ready")
            client = loop.call(client_package.connect(f"nats://127.0.0.1:{port}"))
            stream = {"name": "bench", "subjects": ["later.*", "due.*"], "storage": "file", "num_replicas": 1}
            stream |= {"allow_msg_schedules": True, "allow_rollup_hdrs": True, "allow_msg_ttl": True}
            answer = loop.call(client.request("$JS.API.STREAM.CREATE.bench", json.dumps(stream).encode(), timeout=10))
            if "error" in json.loads(answer.data):
                raise ImportError(f"nats-server 2.12 or newer; {found} is installed")

            async def on_message(message: Any) -> None:
                runs.add(int(message.data))
                await message.ack()

            loop.call(client.jetstream().subscribe("due.*", cb=on_message, manual_ack=True))
            yield Nats(f"NATS {found}, schedules", client, loop)
            loop.call(client.close())
        finally:
            server.terminate()
            server.wait(30)
            loop.stop()


# --- Celery and Dramatiq with Redis -------------------------------------------------------------


class Celery:
    """Tasks with an ETA, and a worker with two processes; `cancel` is a revoke, which has no answer."""

    def __init__(self, tasks: Any) -> None:
        self.title = f"Celery {version('celery')}, Redis"
        self._tasks = tasks
        self._ids: dict[int, str] = {}
        self._start()

    def _start(self) -> None:
        """Start the worker in a process group of its own."""
        command = ["celery", "-A", "bench.celery_eta_tasks:celery", "worker", "-c", "2", "--loglevel=ERROR"]
        self._worker = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def restart(self) -> None:
        """Stop the worker as Celery's documentation says, and start it again."""
        self._worker.send_signal(signal.SIGTERM)
        self._worker.wait(60)
        self._start()

    def kill(self) -> None:
        """Kill the worker with its processes."""
        os.killpg(self._worker.pid, signal.SIGKILL)
        self._worker.wait()

    def send(self, number: int, due_ms: int) -> None:
        eta = datetime.fromtimestamp(due_ms / 1_000, UTC)
        self._ids[number] = self._tasks.tick.apply_async((number, due_ms), eta=eta).id

    def cancel(self, number: int) -> bool | None:
        self._tasks.celery.control.revoke(self._ids[number])
        return None


@contextlib.contextmanager
def celery(runs: Runs) -> Iterator[Product]:
    with scratch_folder() as folder, redis_server() as redis:
        noted = folder.absolute() / "runs"
        os.environ |= {"BENCH_REDIS": redis.url, "BENCH_RUNS": str(noted)}
        tasks = importlib.import_module("bench.celery_eta_tasks")
        ended = threading.Event()

        def follow() -> None:
            """Take over what the processes of the worker have noted."""
            place = 0
            while not ended.wait(0.05):
                whole = noted.read_bytes() if noted.exists() else b""
                for number, _, at_ms in tasks.RUN.iter_unpack(whole[place : len(whole) - len(whole) % tasks.RUN.size]):
                    runs.times.setdefault(number, []).append(at_ms)
                place = len(whole) - len(whole) % tasks.RUN.size

        follower = threading.Thread(target=follow)
        follower.start()
        product = Celery(tasks)
        try:
            yield product
        finally:
            product.kill()
            ended.set()
            follower.join()


class Dramatiq:
    """Messages with a delay, and a worker in this process. Dramatiq has no cancel."""

    def __init__(self, actor: Any) -> None:
        self.title = f"Dramatiq {version('dramatiq')}, Redis"
        self._actor = actor

    def send(self, number: int, due_ms: int) -> None:
        self._actor.send_with_options(args=(number,), delay=max(round(due_ms - time.time() * 1_000), 0))

    def cancel(self, number: int) -> bool | None:
        raise NotImplementedError


@contextlib.contextmanager
def dramatiq(runs: Runs) -> Iterator[Product]:
    package = importlib.import_module("dramatiq")
    with redis_server() as redis:
        broker = importlib.import_module("dramatiq.brokers.redis").RedisBroker(url=redis.url)
        package.set_broker(broker)
        actor = package.actor(runs.add, queue_name="bench")
        worker = importlib.import_module("dramatiq.worker").Worker(broker)
        worker.start()
        try:
            yield Dramatiq(actor)
        finally:
            worker.stop()
            broker.close()


# --- Procrastinate with PostgreSQL --------------------------------------------------------------


class Procrastinate:
    """Jobs with a time, and a worker in this process; `cancel` changes the state of the job in the database."""

    def __init__(self, title: str, application: Any, tick: Any, loop: Loop) -> None:
        self.title = title
        self._application, self._tick, self._loop = application, tick, loop
        self._ids: dict[int, int] = {}

    def send(self, number: int, due_ms: int) -> None:
        job = self._tick.configure(schedule_at=datetime.fromtimestamp(due_ms / 1_000, UTC))
        self._ids[number] = self._loop.call(job.defer_async(number=number))

    def cancel(self, number: int) -> bool | None:
        return bool(self._loop.call(self._application.job_manager.cancel_job_by_id_async(self._ids[number])))


@contextlib.contextmanager
def procrastinate(runs: Runs, polling_s: float = 5.0) -> Iterator[Product]:
    package = importlib.import_module("procrastinate")
    if binaries() is None:
        raise ImportError("postgresql")
    loop = Loop()
    with postgres_server() as url:
        connector = package.PsycopgConnector(conninfo=url.replace("+psycopg", ""))
        application = package.App(connector=connector)

        @application.task(name="tick")  # type: ignore[untyped-decorator]
        async def tick(number: int) -> None:
            runs.add(number)

        loop.call(application.open_async())
        loop.call(application.schema_manager.apply_schema_async())
        worker = asyncio.run_coroutine_threadsafe(
            application.run_worker_async(fetch_job_polling_interval=polling_s, install_signal_handlers=False), loop.loop
        )
        title = f"Procrastinate {version('procrastinate')}, PostgreSQL, polls every {polling_s:g} s"
        try:
            yield Procrastinate(title, application, tick, loop)
        finally:
            worker.cancel()
            time.sleep(0.5)
            loop.call(application.close_async())
            loop.stop()


def procrastinate_fast(runs: Runs) -> contextlib.AbstractContextManager[Product]:
    return procrastinate(runs, 0.1)


PRODUCTS: dict[str, Callable[[Runs], contextlib.AbstractContextManager[Product]]] = {
    "embedded": embedded,
    "server": our_server,
    "nats": nats,
    "celery": celery,
    "dramatiq": dramatiq,
    "procrastinate": procrastinate,
    "procrastinate-0.1s": procrastinate_fast,
}


# --- the work -----------------------------------------------------------------------------------


def main() -> None:
    """Run each product in a process of its own."""
    quiet()
    count, rate = int((sys.argv[1:] or ["500"])[0]), float((sys.argv[2:] or ["50"])[0])
    if len(sys.argv) <= 3:
        for name in PRODUCTS:
            subprocess.run([sys.executable, "-m", "bench.delay_peers", str(count), str(rate), name], check=True)
        return
    name = sys.argv[3]
    if name in ("celery", "dramatiq") and PROGRAM is None:
        print(f"{name}: left out, redis-server is missing", flush=True)
        return
    runs = Runs()
    try:
        with PRODUCTS[name](runs) as product:
            measure(product, runs, count, rate)
    except ImportError as missing:
        print(f"{name}: left out, it needs {missing.name or missing}", flush=True)


def measure(product: Product, runs: Runs, count: int, rate: float) -> None:
    """Measure one product, and print its lines."""
    print(product.title, flush=True)
    warm = range(-WARM_UP, 0)
    for number in warm:
        product.send(number, now_ms() + 200)
    eventually(lambda: runs.times.keys() >= set(warm), "the first messages are there")
    start_ms = now_ms() + LEAD_MS
    due_ms = {number: start_ms + round(number * 1_000 / rate) for number in range(count)}
    for number, at_ms in due_ms.items():
        product.send(number, at_ms)
    sent_late = sum(now_ms() > at_ms for at_ms in due_ms.values())
    wait_for_end(runs, due_ms)
    lateness = [runs.times[number][0] - at_ms for number, at_ms in due_ms.items() if number in runs.times]
    print(
        f"  lateness of {len(lateness)} messages: p50 {percentile(lateness, 0.5):,.1f} ms, "
        f"p99 {percentile(lateness, 0.99):,.1f} ms, largest {max(lateness):,.1f} ms; "
        f"early {sum(each < 0 for each in lateness)}, not there {count - len(lateness)}, "
        f"twice {sum(len(runs.times.get(number, ())) > 1 for number in due_ms)}"
        + (f"; {sent_late} were sent too late" if sent_late else ""),
        flush=True,
    )
    race(product, runs, percentile(lateness, 0.9))
    if isinstance(product, Celery):  # the others store a cancel where they store the message
        after_restart(product, runs)


def race(product: Product, runs: Runs, window_ms: float) -> None:
    """Cancel messages about the time of their release, and compare the answers with what was delivered."""
    chance, first = random.Random(1), 1_000_000
    start_ms = now_ms() + LEAD_MS
    due_ms = {first + number: start_ms + number * 20 for number in range(RACES)}
    for number, at_ms in due_ms.items():
        product.send(number, at_ms)
    cancel_ms = {number: at_ms + chance.uniform(-20, window_ms + 5) for number, at_ms in due_ms.items()}
    answers: dict[int, bool | None] = {}
    in_time = set()
    for number in sorted(cancel_ms, key=lambda each: cancel_ms[each]):
        time.sleep(max(cancel_ms[number] / 1_000 - time.time(), 0))
        try:
            answers[number] = product.cancel(number)
        except NotImplementedError:
            print("  cancel: none", flush=True)
            return
        if time.time() * 1_000 < due_ms[number]:
            in_time.add(number)
    wait_for_end(runs, {number: at_ms for number, at_ms in due_ms.items() if not answers[number]})
    delivered = runs.times.keys() & due_ms.keys()
    outcomes = Counter((answer, number in delivered) for number, answer in answers.items())
    print(
        f"  {RACES} cancels: cancelled {outcomes[True, False]}, too late {outcomes[False, True]}, "
        f"answered 'cancelled' but delivered {outcomes[True, True]}, "
        f"answered 'too late' but not delivered {outcomes[False, False]}; "
        f"no answer {outcomes[None, True] + outcomes[None, False]}, of them delivered {outcomes[None, True]}; "
        f"delivered though the cancel ended before the due time {len(in_time & delivered)} of {len(in_time)}",
        flush=True,
    )


def after_restart(product: Celery, runs: Runs) -> None:
    """Cancel messages, restart the consumer, and count those that are delivered."""
    due_ms = {2_000_000 + number: now_ms() + 15_000 for number in range(50)}
    for number, at_ms in due_ms.items():
        product.send(number, at_ms)
    time.sleep(2)  # the worker fetches them
    for number in due_ms:
        product.cancel(number)
    time.sleep(2)
    product.restart()
    wait_for_end(runs, due_ms)
    delivered = len(runs.times.keys() & due_ms.keys())
    print(f"  cancelled, then the worker was restarted: delivered {delivered} of {len(due_ms)}", flush=True)


def wait_for_end(runs: Runs, due_ms: dict[int, int]) -> None:
    """Wait until all messages are there, or until none has come for some seconds after the last due time."""
    last_ms = max(due_ms.values(), default=0)
    while not runs.times.keys() >= due_ms.keys():
        newest = max((times[-1] for times in list(runs.times.values())), default=0.0)
        if time.time() * 1_000 > max(last_ms, newest) + IDLE_S * 1_000:
            return
        time.sleep(0.1)
    time.sleep(1)  # for messages that come twice


def now_ms() -> int:
    """Return the time."""
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    main()
