"""A hand-over between two servers over real sockets, by two processes of one application."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqtemplate import ConsumeMode, MessageExt, MQApplication, message_listener
from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import HandOverPhase
from mqtemplate.brokers import RemoteBroker
from mqtemplate.handover import HandOverBroker
from mqtemplate.handover.old_broker import SendDirection
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from tests.brokers.remote.clients import client, server
from tests.waiting import eventually

KEYS = 4
OLD, NEW = range(30), range(30, 60)

WORKER = """
import sys
from mqtemplate import MQApplication
from tests.handover.test_two_processes import moving, recording

old, new, file = sys.argv[1:]
MQApplication(recording(file), settings=moving(old, new), environment={}).run()
"""


def moving(old: str, new: str) -> dict[str, object]:
    """Return the settings of each process: the new broker, and the one that it leaves."""
    return {"rocketmq.name-server": new, "mqtemplate.hand-over.from": old, "rocketmq.producer.group": "shop"}


def recording(path: str | Path) -> object:
    """Return an ordered listener that appends each message to a file, which all processes share."""

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ConsumeMode.ORDERLY)
    def bill(message: MessageExt) -> None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{message.body.decode()} {os.getpid()}\n")

    return bill


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    """Addresses of the old and the new server."""
    with ExitStack() as stack:
        old, new = (stack.enter_context(server()) for _ in range(2))
        yield str(old.address), str(new.address)


def fill(address: str, folder: Path) -> str:
    """Let a group begin at the old server, and leave messages there. Return the handle of a pending one."""
    with client(address, folder) as broker:
        broker.create_topic("orders", KEYS)
        for queue in broker.queues("orders"):
            broker.groups.commit_offset("billing", queue, 0)
        send(broker, broker.queues("orders"), OLD)
        delayed = Message("orders", b"cancelled", {Property.TIMER_DELAY_MS: "3600000", Property.KEYS: "o-1"})
        handle = broker.sends.send(delayed).handle
    assert handle is not None
    return handle


def send(broker: Broker, queues: object, numbers: range) -> None:
    assert isinstance(queues, (tuple, list))
    for number in numbers:
        queue: MessageQueue = sorted(queues)[number % KEYS]
        broker.sends.send(Message("orders", f"{number % KEYS} {number}".encode()), queue)


def lines_of(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines() if path.exists() else []


def handled(path: Path) -> list[int]:
    """Return the numbers of the messages in the order of their first handling; a new member may repeat some."""
    return list(dict.fromkeys(int(line.split()[1]) for line in lines_of(path)))


def test_no_key_overtakes_itself_over_all_members_of_two_processes(addresses: tuple[str, str], tmp_path: Path) -> None:
    """Each process has the setting. A queue of the new server waits for the old queues of both processes."""
    old, new = addresses
    file = tmp_path / "handled"
    fill(old, tmp_path / "old")
    command = [sys.executable, "-W", "error", "-c", WORKER, old, new, str(file)]
    worker = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    try:
        with MQApplication(recording(file), settings=moving(old, new), environment={}) as app:
            group = app.broker.admin().group
            eventually(lambda: len(group("billing").members) == 2 * 2, "both processes are members at both servers")
            send(app.broker, app.broker.queues("orders"), NEW)
            eventually(lambda: len(handled(file)) == len(OLD) + len(NEW), "all messages are handled")
    finally:
        worker.kill()
        worker.wait()

    for key in range(KEYS):
        numbers = [number for number in handled(file) if number % KEYS == key]
        assert numbers == [number for number in (*OLD, *NEW) if number % KEYS == key]
    processes = {line.split()[2] for line in lines_of(file) if int(line.split()[1]) in NEW}
    assert len(processes) == 2


def test_pending_messages_of_the_old_server_are_changed_by_a_process_with_the_setting(
    addresses: tuple[str, str], tmp_path: Path
) -> None:
    old, new = addresses
    handle = fill(old, tmp_path / "old")

    with MQApplication(settings=moving(old, new), environment={}) as app:
        broker = app.broker
        assert isinstance(broker, HandOverBroker)
        assert isinstance(broker.old, RemoteBroker)
        pending = broker.delayed.pending(PendingQuery(key="o-1"))
        change = app.template.cancel(handle)

    assert [message.keys for message in pending.messages] == ["o-1"]
    assert (change.status, change.count) == (ScheduleChangeStatus.CANCELLED, 1)


def test_an_old_server_that_goes_down_does_not_stop_the_new_one(tmp_path: Path) -> None:
    """A concurrent listener goes on with the new broker."""
    seen: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(text: str) -> None:
        seen.append(text)

    with server() as new, ExitStack() as stack:
        old = stack.enter_context(server())
        fill(str(old.address), tmp_path / "old")
        with MQApplication(bill, settings=moving(str(old.address), str(new.address)), environment={}) as app:
            eventually(lambda: len(seen) == len(OLD), "the old messages are handled")
            stack.close()
            app.template.sync_send("orders", "new")
            eventually(lambda: "new" in seen, "the new message is handled")
            eventually(lambda: app.health().brokers["broker"] is not None, "the outage is reported")
            assert "old:" in str(app.health().brokers["broker"])


def test_each_process_learns_from_the_old_server_that_the_hand_over_is_aborted(
    addresses: tuple[str, str], tmp_path: Path
) -> None:
    """And again that it goes on. The change is made by another process, as the command line does it."""
    old, new = addresses
    fill(old, tmp_path / "old")
    with (
        MQApplication(settings=moving(old, new), environment={}) as app,
        client(old, tmp_path / "operator") as operator,
    ):

        def is_sent_to_old() -> bool:
            return app.template.sync_send("orders", "1").message_queue.broker_name.startswith("old:")

        assert not is_sent_to_old()
        operator.hand_over.change(HandOverPhase.ABORTING)
        eventually(is_sent_to_old, "the sends go to the old server")
        assert app.template.sync_send("orders", "1", hash_key="k").message_queue.broker_name.startswith("old:")
        operator.hand_over.change(HandOverPhase.RUNNING)
        eventually(lambda: not is_sent_to_old(), "the sends go to the new server")


def test_a_process_that_stood_still_learns_of_the_abort_before_its_next_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread that reads the state did not run either. While the old server is away, the last state counts."""
    with ExitStack() as stack, ExitStack() as servers:
        old = servers.enter_context(server())
        broker = stack.enter_context(client(str(old.address), tmp_path))
        broker.hand_over.begin("new")
        direction = SendDirection(broker, has_state=True)
        monkeypatch.setattr(direction._service, "trigger", direction._read)  # as the thread does, without a race
        assert not direction.is_to_old()

        broker.hand_over.change(HandOverPhase.ABORTING)
        direction._known_ms -= 60_000
        assert direction.is_to_old()

        servers.close()
        direction._known_ms -= 60_000
        assert direction.is_to_old()
        monkeypatch.setattr(
            direction._service, "trigger", lambda: pytest.fail("no send waits for a broker that is away")
        )
        assert direction.is_to_old()
