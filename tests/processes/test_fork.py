"""Fork: a child has the memory of a broker but must not use it. The parent's messages are unharmed."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.context import MQApplication
from mqtemplate.errors import ForkedError, StoreLockedError
from mqtemplate.listener import message_listener
from mqtemplate.message import Message, MessageQueue
from mqtemplate.pending import PendingQuery
from mqtemplate.record.codec import Drafts
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.template import RocketMQTemplate
from tests.forking import fork, in_child
from tests.programs import run_python
from tests.store.small_store import draft, small
from tests.waiting import eventually

QUEUE = MessageQueue("orders", "broker-a", 0)
BILLING = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()})


@pytest.fixture(params=["disk", "memory"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker with threads and one message."""
    with EmbeddedBroker(tmp_path / "store" if request.param == "disk" else None) as broker:
        broker.sends.send(Message("orders", b"before"), QUEUE)
        yield broker


def errors_of(calls: dict[str, Callable[[], object]]) -> str:
    """Return the calls that did not raise `ForkedError`, nor end the program with its report, each on a line."""
    wrong = []
    for name, call in calls.items():
        try:
            wrong.append(f"{name}: returned {call()!r}")
        except ForkedError as exc:
            if "was started by process" not in str(exc):
                wrong.append(f"{name}: {exc}")
        except SystemExit as exc:
            if not isinstance(exc.__cause__, ForkedError):
                wrong.append(f"{name}: ended by {exc.__cause__!r}")
        except Exception as exc:
            wrong.append(f"{name}: {type(exc).__name__}: {exc}")
    return "\n".join(wrong)


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bodies(broker: EmbeddedBroker, topic: str = "orders") -> list[bytes]:
    return [
        message.body
        for queue in broker.queues(topic)
        for message in broker.reader.pull(queue, broker.reader.min_offset(queue), 1_000).messages
    ]


# --- every use ----------------------------------------------------------------------------------------


def test_every_use_of_a_broker_in_a_child_raises(broker: EmbeddedBroker) -> None:
    message = Message("orders", b"child")
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: broker.sends.send(message),
        "send_batch": lambda: broker.sends.send_batch([message]),
        "send_async": lambda: broker.sends.send_async([message]),
        "send_one_way": lambda: broker.sends.send_one_way(message),
        "send_half": lambda: broker.sends.send_half(message, "g"),
        "request": lambda: broker.requests.request(message),
        "queues": lambda: broker.queues("orders"),
        "create_topic": lambda: broker.create_topic("more"),
        "pull": lambda: broker.reader.pull(QUEUE, 0),
        "min_offset": lambda: broker.reader.min_offset(QUEUE),
        "subscribe": lambda: broker.groups.subscribe(BILLING),
        "commit_offset": lambda: broker.groups.commit_offset("billing", QUEUE, 1),
        "committed_offset": lambda: broker.groups.committed_offset("billing", QUEUE),
        "cancel": lambda: broker.delayed.cancel(key="1", topic="orders"),
        "pending": lambda: broker.delayed.pending(PendingQuery()),
        "change_delay_levels": lambda: broker.change_delay_levels("1s"),
        "services": broker.services,
        "start": broker.start,
    }

    assert in_child(lambda: errors_of(calls)) == ""
    assert bodies(broker) == [b"before"]


def test_every_use_of_a_consumer_in_a_child_raises(broker: EmbeddedBroker) -> None:
    consumer = broker.groups.subscribe(BILLING)
    (message,) = consumer.poll(10, 5_000)
    calls: dict[str, Callable[[], object]] = {
        "poll": lambda: consumer.poll(1),
        "commit": lambda: consumer.commit(QUEUE, 1),
        "seek": lambda: consumer.seek(QUEUE, 0),
        "position": lambda: consumer.position(QUEUE),
        "lock": lambda: consumer.lock(QUEUE),
        "unlock": lambda: consumer.unlock(QUEUE),
        "send_back": lambda: consumer.send_back(message),
    }

    assert in_child(lambda: errors_of(calls) + str(consumer.close() or "")) == ""
    assert consumer.committed(QUEUE) is None
    consumer.close()


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_every_use_of_a_store_in_a_child_raises(tmp_path: Path, kind: str) -> None:
    store_files = FolderStoreFiles(tmp_path) if kind == "disk" else MemoryStoreFiles()
    store = MessageStore(store_files, small(), SystemClock())
    store.load()
    put = store.put(draft(b"before"))
    store.confirm(put.end, ["orders"])
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(draft(b"child")),
        "put_many": lambda: store.put(Drafts([draft(b"child")])),
        "prepare": lambda: store.prepare("orders", 1),
        "confirm": lambda: store.confirm(put.end, ["orders"]),
        "confirm_async": lambda: store.confirm_async(put.end, ["orders"]),
        "read": lambda: store.read(put.physical_offset, put.size),
        "end_offset": lambda: store.end_offset,
        "flush": store.flush,
        "take_checkpoint": store.take_checkpoint,
        "delete_before": lambda: store.delete_before(0),
    }
    if kind == "disk":
        calls["write_bytes"] = lambda: store_files.write_bytes("config/topics.json", b"{}")
        calls["delete"] = lambda: store_files.delete("abort")

    assert in_child(lambda: errors_of(calls)) == ""
    assert store.read(put.physical_offset, put.size).body == b"before"
    store.close()


def test_every_use_of_a_template_in_a_child_raises(broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(broker, consumer_group="reader", consumer_topic="orders")
    assert template.receive(str, timeout="5s") == ["before"]
    calls: dict[str, Callable[[], object]] = {
        "sync_send": lambda: template.sync_send("orders", "child"),
        "delayed": lambda: template.sync_send("orders", "child", delay="10s"),
        "async_send": lambda: template.async_send("orders", "child").result(0),
        "send_one_way": lambda: template.send_one_way("orders", "child"),
        "send_and_receive": lambda: template.send_and_receive("orders", "child", str),
        "receive": lambda: template.receive(str),
        "pending": template.pending,
    }

    assert in_child(lambda: errors_of(calls) + str(template.close() or "")) == ""
    assert bodies(broker) == [b"before"]
    template.close()


def test_the_application_of_the_parent_does_nothing_in_a_child(tmp_path: Path) -> None:
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(order: str) -> None:
        received.append(order)

    with MQApplication(bill, settings={"rocketmq.name-server": f"embedded:{tmp_path}"}, environment={}) as app:
        calls: dict[str, Callable[[], object]] = {
            "template": lambda: app.template,
            "broker": lambda: app.broker,
            "listeners": lambda: app.listeners,
            "services": app.services,
            "start": app.start,
            "run": app.run,
        }

        assert in_child(lambda: errors_of(calls) + str(app.stop() or "")) == ""

        app.template.sync_send("orders", "parent")
        eventually(lambda: received == ["parent"], "the parent's listener works")


def test_the_error_says_which_object_which_process_and_what_to_do(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        error = in_child(lambda: str(broker.sends.send(Message("orders", b"child"))))

    assert error.startswith(
        f"ForkedError: broker 'broker-a' (store directory {tmp_path}), with the templates and consumers that use it, "
        f"was started by process {os.getpid()}, and this is process "
    )
    assert "after the fork" in error
    assert "gunicorn: post_fork" in error
    assert "start it with 'mqtemplate broker' and point rocketmq.name-server at it" in error


# --- the parent ---------------------------------------------------------------------------------------


def test_a_child_that_exits_touches_no_file(tmp_path: Path) -> None:
    """Neither ``close``, nor the end of a ``with`` block, nor garbage collection, nor exit handlers."""
    broker = EmbeddedBroker(tmp_path / "store", clock=VirtualClock())
    broker.start()
    broker.sends.send(Message("orders", b"x"))
    broker.sends.send(Message("orders", b"later", {"TIMER_DELAY_MS": "60000"}))
    broker.groups.commit_offset("billing", QUEUE, 1)
    services = list(broker.services())
    before = contents(tmp_path / "store")

    def work() -> str:
        nonlocal broker
        stepped = errors_of({service.name: service.step for service in services})
        with pytest.raises(ForkedError), broker:
            pass
        broker.close()
        broker.store.close()
        broker.store.release()
        broker = None  # type: ignore[assignment]
        gc.collect()
        return "" if "Error" not in stepped else stepped

    assert in_child(work) == ""

    assert contents(tmp_path / "store") == before
    assert "abort" in before
    with pytest.raises(StoreLockedError):  # the parent still has its lock
        EmbeddedBroker(tmp_path / "store").start()
    broker.close()


def test_a_message_is_sent_while_children_come_and_go(tmp_path: Path) -> None:
    """Parent and child send 50 messages each. Those of the parent are there after a restart, and no other."""
    with EmbeddedBroker(tmp_path) as broker:
        broker.sends.send(Message("orders", b"first"), QUEUE)
        child = fork()
        if child == 0:
            failed = 0
            for number in range(50):
                try:
                    broker.sends.send(Message("orders", b"child %d" % number), QUEUE)
                except ForkedError:
                    failed += 1
            os._exit(failed)
        for number in range(50):
            broker.sends.send(Message("orders", b"parent %d" % number), QUEUE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 50

    with EmbeddedBroker(tmp_path) as broker:
        assert bodies(broker) == [b"first", *(b"parent %d" % number for number in range(50))]


def test_a_child_may_start_a_broker_of_its_own(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "parent") as broker:

        def work() -> str:
            with EmbeddedBroker(tmp_path / "child") as own:
                own.sends.send(Message("orders", b"child"))
                return str(bodies(own))

        assert in_child(work) == "[b'child']"
        assert "in use by process" in in_child(lambda: str(EmbeddedBroker(tmp_path / "parent").start()))
        broker.sends.send(Message("orders", b"parent"))


def test_a_broker_that_was_created_before_the_fork_may_start_after_it(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path)

    def work() -> str:
        with broker:
            broker.sends.send(Message("orders", b"child"))
            return str(bodies(broker))

    assert in_child(work) == "[b'child']"


def test_a_child_may_open_the_folder_once_the_parent_has_closed_it(tmp_path: Path) -> None:
    """The child inherits the list of locks, which is not true any more."""
    reader, writer = os.pipe()
    broker = EmbeddedBroker(tmp_path)
    broker.start()
    child = fork()
    if child == 0:
        os.read(reader, 1)
        try:
            with EmbeddedBroker(tmp_path) as own:
                own.sends.send(Message("orders", b"child"))
        except BaseException:
            os._exit(1)
        os._exit(0)
    broker.sends.send(Message("orders", b"parent"))
    broker.close()
    os.write(writer, b"x")

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with EmbeddedBroker(tmp_path) as broker:
        assert sorted(bodies(broker)) == [b"child", b"parent"]


HANDLER_THAT_FORKS = """
import os, sys, threading
from mqtemplate import MQApplication, message_listener

handled = []
done = threading.Event()

@message_listener(topic="orders", consumer_group="billing", consume_thread_number=1)
def bill(order: str) -> None:
    handled.append(order)
    print(os.getpid(), order, flush=True)
    if order == "1":
        os.fork()  # the child returns from the handler, as a careless program does
    if order == "5":
        done.set()

with MQApplication(bill, settings={"rocketmq.name-server": "embedded:" + sys.argv[1]}, environment={}) as app:
    for number in range(1, 6):
        app.template.sync_send("orders", str(number), hash_key="a")
    done.wait()
print("parent", os.getpid())
"""


def test_a_child_forked_in_a_handler_handles_no_further_message(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANDLER_THAT_FORKS, encoding="utf-8")

    ended = run_python(tmp_path, "-W", "ignore", "program.py", str(tmp_path / "store"))

    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    parent = lines[-1].removeprefix("parent ")
    assert sorted(line for line in lines if line.startswith(parent)) == [f"{parent} {number}" for number in range(1, 6)]
    assert len([line for line in lines[:-1] if line[-2:] in (" 1", " 2", " 3", " 4", " 5")]) == 5
