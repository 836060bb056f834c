"""Many queues, few descriptors: the files of idle queues are unmapped, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.store.consume_queue import ConsumeQueue, MappedQueues
from mqtemplate.store.files.layout import CqUnit
from mqtemplate.store.files.mapped_files import MappedFileQueue

SETTINGS = EmbeddedSettings(max_mapped_queues=3, default_topic_queue_nums=1)
COUNT = 20


@contextmanager
def broker_on(folder: Path, settings: EmbeddedSettings = SETTINGS) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(folder, settings, VirtualClock())
    broker.start()
    yield broker
    broker.close()


def queue_descriptors(store: Path) -> int:
    """Return how many descriptors of this process belong to files of the store's consume queues."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sum(link.startswith(f"{store}/consumequeue/") for link in links)


def send_to_each(broker: EmbeddedBroker, body: bytes) -> None:
    for number in range(COUNT):
        broker.sends.send(Message(f"topic-{number}", body, {}))


def bodies(broker: EmbeddedBroker, number: int) -> list[bytes]:
    queue, found = MessageQueue(f"topic-{number}", broker.name, 0), []
    while messages := broker.reader.pull(queue, len(found)).messages:  # one pull ends at the end of a file
        found += [message.body for message in messages]
    return found


linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the descriptors are counted in /proc")


@linux
def test_idle_queues_take_no_descriptors_and_are_read_and_written_as_before(tmp_path: Path) -> None:
    """Each new topic took two descriptors for ever: with a limit of 1,024 everything stopped at topic 502."""
    with broker_on(tmp_path) as broker:
        for body in (b"first", b"second"):
            send_to_each(broker, body)
            assert queue_descriptors(tmp_path) <= 2 * 3
            broker.store.take_checkpoint()
            assert queue_descriptors(tmp_path) <= 2 * 3

        assert [bodies(broker, number) for number in range(COUNT)] == [[b"first", b"second"]] * COUNT
        assert queue_descriptors(tmp_path) <= 2 * 3
    with broker_on(tmp_path) as broker:
        assert queue_descriptors(tmp_path) <= 2 * 3
        send_to_each(broker, b"third")
        assert [bodies(broker, number) for number in range(COUNT)] == [[b"first", b"second", b"third"]] * COUNT


def test_a_crash_with_released_queues_loses_no_message(tmp_path: Path) -> None:
    """The units of a released queue are in the page cache, as in a mapped one; a kill does not touch it."""
    broker = EmbeddedBroker(tmp_path, SETTINGS, VirtualClock())
    broker.start()
    send_to_each(broker, b"first")
    broker.store.release()  # as a kill: no progress is written

    with broker_on(tmp_path) as broker:
        assert [bodies(broker, number) for number in range(COUNT)] == [[b"first"]] * COUNT
        assert broker.reader.search_offset(MessageQueue("topic-0", broker.name, 0), 0) == 0


def test_a_reader_of_a_released_queue_sees_the_next_messages(tmp_path: Path) -> None:
    settings = EmbeddedSettings(max_mapped_queues=1, default_topic_queue_nums=1, mapped_file_size_consume_queue=60)
    with broker_on(tmp_path, settings) as broker:
        sent = []
        for number in range(10):
            sent.append(f"{number}".encode())
            broker.sends.send(Message("topic-0", sent[-1], {}))
            broker.sends.send(Message("topic-1", b"other", {}))  # releases the files of the first topic
            assert bodies(broker, 0) == sent


def test_the_queue_that_was_mapped_first_is_released_unless_it_is_in_use() -> None:
    mapped, queues = MappedQueues(2), [Queue(), Queue(), Queue(), Queue()]
    for queue in queues[:2]:
        mapped.note(queue)
    queues[0].max_offset = 5

    mapped.note(queues[2])
    assert [queue.is_released for queue in queues] == [False, True, False, False]
    queues[0].max_offset = 6
    mapped.note(queues[3])
    assert [queue.is_released for queue in queues] == [False, True, True, False]
    assert len(mapped) == 2


class Queue:
    """A queue that notes its release."""

    def __init__(self) -> None:
        self.max_offset = 0
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


_MANY_TOPICS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
with EmbeddedBroker(sys.argv[1], EmbeddedSettings(default_topic_queue_nums=1)) as broker:
    for number in range(300):
        broker.sends.send(Message(f"topic-{number}", b"x", {}))
print("sent")
"""


@linux
def test_more_topics_than_descriptors_work(tmp_path: Path) -> None:
    for _ in range(2):  # the second run opens all queues of the first one
        done = subprocess.run(
            [sys.executable, "-c", _MANY_TOPICS, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr


def test_the_end_of_a_queue_is_known_while_its_last_message_is_deleted() -> None:
    """The deletion comes after the reader has looked where the queue starts. A pull was refused, or others waited."""
    queue = ReadDuringDeletion(MappedFileQueue(200))
    queue.reserve(1)
    queue.append(0, 100, 0)

    assert queue.end_before(50) == 1
    assert queue.min_offset == 1


class ReadDuringDeletion(ConsumeQueue):
    """A queue whose records are deleted just before a unit is read."""

    def unit(self, queue_offset: int) -> CqUnit:
        self.delete_before(100)
        return super().unit(queue_offset)
