"""Records read ahead: pulls that continue each other return what each alone returns, from fewer reads of the log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import MessageQueue
from mqtemplate.pending import PendingQuery
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server.pulls.raw_reader import RawPull, RawQuery, RawReader, RawStatus, ReadAhead
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.server.pulls.pulled import numbers, whole
from tests.server.serving import Serving

ORDERS = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of the log from now on."""
    sizes: list[int] = []
    read = MessageStore.read_bytes

    def noted(self: MessageStore, physical_offset: int, size: int) -> bytes:
        sizes.append(size)
        return read(self, physical_offset, size)

    monkeypatch.setattr(MessageStore, "read_bytes", noted)
    return sizes


def fill(serving: Serving, count: int, size: int = 4, topic: str = "orders", **properties: str) -> None:
    """Store messages whose bodies are their numbers, all of one size."""
    for number in range(count):
        serving.send(topic, b"%0*d" % (size, number), {"UNIQ_KEY": f"A{number:04}", **properties})


def raw_reader(serving: Serving, **limits: int) -> RawReader:
    return RawReader(serving.engine.store, serving.engine.engine.queues, ReadAhead(serving.engine.store, **limits))


def pulls(raw: RawReader, query: RawQuery, at: int = 0) -> list[RawPull]:
    """Return the pulls of a consumer that reads the queue to its end."""
    found = []
    while (pull := raw.pull(query, at)).status is not RawStatus.NO_NEW_MSG:
        found.append(whole(pull))
        at = pull.next_begin_offset
    return found


def records_ahead(serving: Serving) -> object:
    return serving.engine.metrics.snapshot()["server.read_ahead"]


def damage(serving: Serving, queue_offset: int) -> None:
    """Change a byte of the body of one message."""
    store = serving.engine.store
    damaged = store.consume_queue("orders", 0).unit(queue_offset).physical_offset
    file, start = store._commit_log.files.find(damaged) or pytest.fail("no file")
    file.write_mapped(damaged - start + 89, b"\0")


def test_the_second_pull_reads_for_the_next_ones(serving: Serving, reads: list[int]) -> None:
    fill(serving, 200)
    raw, counts, ahead = raw_reader(serving), [], []
    reads.clear()

    for at in range(0, 200, 32):
        assert numbers(raw.pull(RawQuery(ORDERS, 32, 1 << 20, None), at)) == list(range(at, min(at + 32, 200)))
        counts.append(len(reads))
        ahead.append(records_ahead(serving))

    assert counts == [1, 2, 2, 2, 2, 2, 2]
    assert ahead == [0, 136, 104, 72, 40, 8, 0]


@pytest.mark.parametrize("seed", range(8))
def test_pulls_that_continue_each_other_return_the_same_as_one_by_one(seed: int) -> None:
    """Across files of the log, with records of other queues and sizes between, limits, and a damaged record."""
    chance = random.Random(seed)
    sizes = EmbeddedSettings(mapped_file_size_commit_log=8_192, mapped_file_size_consume_queue=2_000)
    with Serving(engine_settings=sizes) as serving:
        for number in range(300):
            size = 50 if chance.random() < 0.97 else chance.randrange(60)
            serving.send("orders", b"%03d" % number * (size // 3), {"UNIQ_KEY": f"A{number:03}"}, queue_id=0)
            if chance.random() < 0.3:
                serving.send("orders", bytes(chance.randrange(5_000)), queue_id=1)
        damage(serving, chance.randrange(300))
        found = []
        for fewest in (2, 1_000_000):
            raw = raw_reader(serving, fewest=fewest)
            limits = list(product((1, 7, 32, 40), (10, 2_000, 1 << 20)))
            continued = [pulls(raw, RawQuery(ORDERS, *limit, None)) for limit in limits]
            selectors = (None, TagSelector("*"), TagSelector("a"))
            queries = [RawQuery(ORDERS, *limit, selector) for limit in limits for selector in selectors]
            found.append((continued, [whole(raw.pull(query, at)) for query in queries for at in (0, 1, 19, 60, 149)]))

    assert [sum(pull.count for pull in each) for each in found[0][0]] == [299] * 12
    assert max(pull.count for pull in found[0][1]) == 40
    assert found[0] == found[1]


def test_consumers_at_different_positions_have_parts_of_their_own(serving: Serving, reads: list[int]) -> None:
    fill(serving, 128)
    raw, query = raw_reader(serving), RawQuery(ORDERS, 16, 1 << 20, None)
    for at in (0, 8, 16, 24):
        raw.pull(query, at)
    reads.clear()

    for at in (32, 40, 48, 56):
        assert numbers(raw.pull(query, at)) == list(range(at, at + 16))

    assert reads == []


@pytest.mark.parametrize(
    ("positions", "max_count"), [((0, 40, 20, 60), 10), ((0, 100), 100)], ids=["other positions", "the end"]
)
def test_a_pull_that_continues_no_other_reads_only_what_it_returns(
    positions: tuple[int, ...], max_count: int, serving: Serving
) -> None:
    fill(serving, 100)
    raw = raw_reader(serving)

    for at in positions:
        raw.pull(RawQuery(ORDERS, max_count, 1 << 20, None), at)

    assert records_ahead(serving) == 0


def test_messages_that_arrive_later_are_read_later(serving: Serving) -> None:
    fill(serving, 50)
    raw, query = raw_reader(serving), RawQuery(ORDERS, 16, 1 << 20, None)
    first = [numbers(pull) for pull in pulls(raw, query)]

    fill(serving, 50)

    assert [len(each) for each in first] == [16, 16, 16, 2]
    assert [number for pull in pulls(raw, query, 50) for number in numbers(pull)] == list(range(50))


def test_a_delayed_message_that_was_cancelled_meanwhile_is_not_returned(serving: Serving) -> None:
    fill(serving, 60, DELAY="5")
    handles = [message.handle for message in serving.engine.delayed.pending(PendingQuery()).messages]
    raw, query = raw_reader(serving), RawQuery(MessageQueue(SCHEDULE_TOPIC, "broker-a", 4), 10, 1 << 20, None)
    found = [number for at in (0, 10) for number in numbers(raw.pull(query, at))]
    assert records_ahead(serving) == 40

    assert serving.engine.delayed.cancel(handles[25]).status.name == "CANCELLED"
    found += [number for pull in pulls(raw, query, 20) for number in numbers(pull)]

    assert found == [*range(25), *range(26, 60)]


def test_a_damaged_record_is_logged_and_skipped_when_a_pull_reaches_it(serving: Serving) -> None:
    fill(serving, 100)
    damage(serving, 50)
    raw, query = raw_reader(serving), RawQuery(ORDERS, 10, 1 << 20, None)

    with capture_logs() as logs:
        before = [numbers(raw.pull(query, at)) for at in (0, 10, 20, 30)]
        assert logs == []
        after = [numbers(pull) for pull in pulls(raw, query, 40)]

    assert [number for each in before + after for number in each] == [*range(50), *range(51, 100)]
    assert [(entry["event"], entry["offset"]) for entry in logs] == [("pull.record_corrupt", 50)]


def test_a_limit_of_bytes_ends_a_pull_but_not_the_reading_ahead(serving: Serving, reads: list[int]) -> None:
    fill(serving, 100)
    size = serving.engine.store.consume_queue("orders", 0).unit(0).size
    raw, query = raw_reader(serving), RawQuery(ORDERS, 32, 10 * size, None)
    reads.clear()

    found = [numbers(raw.pull(query, at)) for at in range(0, 90, 10)]

    assert found == [list(range(at, at + 10)) for at in range(0, 90, 10)]
    assert sum(reads) < 2 * 100 * size, "a pull does not read again what the one before it read"


def test_large_records_are_not_read_ahead(serving: Serving) -> None:
    fill(serving, 40, 40_000)
    raw = raw_reader(serving)

    for at in (0, 10, 20):
        raw.pull(RawQuery(ORDERS, 10, 1 << 20, None), at)

    assert records_ahead(serving) == 0


def test_above_the_limit_the_oldest_part_is_dropped(serving: Serving) -> None:
    fill(serving, 100)
    raw, query = raw_reader(serving, max_entries=2), RawQuery(ORDERS, 10, 1 << 20, None)

    for start in (0, 1, 2):
        raw.pull(query, start)
        raw.pull(query, start + 10)

    assert records_ahead(serving) == 79 + 78
