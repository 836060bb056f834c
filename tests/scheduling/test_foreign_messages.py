"""Messages of other programs in the topic of the schedules: a broker is shared, and anyone may send to the topic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from mqtemplate import MQApplication, ScheduledRun, Schedules, VirtualClock, scheduled
from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.message import Message
from mqtemplate.scheduling.topic import RunMessage, ScheduleTopic, find_run_key
from mqtemplate.scheduling.trigger import Trigger
from mqtemplate.testing.harness import Harness

TOPIC = "mqtemplate-schedules"
HOUR_MS = 3_600_000
VALID: dict[str, Any] = {
    "schedule": "report",
    "run_ms": 1_767_229_200_000,
    "deliver_ms": 1_767_229_200_000,
    "trigger": {"cron": None, "every_ms": HOUR_MS, "at_ms": None, "zone": "UTC"},
    "since_ms": 1_767_225_600_000,
    "is_manual": False,
}
KEYS = [
    "order@1@2@3",
    "user@mail@example.com@x",
    "report@x@y@z",
    "report@1@²@00000000",
    "report@\u0661@\u0662@00000000",
    f"report@{'9' * 5_000}@1@00000000",
    f"report@{10**14 * 9}@1@00000000",
    "report@-1@-1@00000000",
    "a b c@@@",
    "@@@",
    f"{'n' * 65}@1@1@00000000",
    "\x1b[2Jreport@1@1@00000000",
    "report",
    "report report@1@x@00000000",
]


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """A broker on a clock at 2026-01-01T00:00:00Z."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        yield broker


@pytest.fixture
def runs() -> list[ScheduledRun]:
    return []


@pytest.fixture
def app(broker: EmbeddedBroker, runs: list[ScheduledRun]) -> Iterator[MQApplication]:
    """An application with an hourly schedule, not started."""

    @scheduled(every="1h", name="report", max_reconsume_times=0)
    def report(run: ScheduledRun) -> None:
        runs.append(run)

    keys = {"rocketmq.name-server": "embedded:memory"}
    app = MQApplication(report, settings=keys, environment={}, starters=[], overrides={Broker: broker})
    yield app
    app.stop()


def send_delayed(broker: EmbeddedBroker, keys: str, tag: str = "report") -> None:
    broker.sends.send(
        Message(TOPIC, b"not a run", {"TAGS": tag, "KEYS": keys, "TIMER_DELAY_SEC": "1800"}), broker.queues(TOPIC)[0]
    )


@pytest.mark.parametrize("keys", KEYS)
def test_an_application_starts_and_runs_beside_a_foreign_key_in_the_topic(
    broker: EmbeddedBroker, app: MQApplication, runs: list[ScheduledRun], keys: str
) -> None:
    """A delayed message of another program has keys of its own: it is not a run."""
    send_delayed(broker, keys)

    app.start()
    [state] = app.get(Schedules).list()
    Harness(app, raise_handler_errors=False).advance("2h")

    assert state.next_run == datetime(2026, 1, 1, 1, tzinfo=UTC)
    assert [run.scheduled_at.hour for run in runs] == [1, 2]


def test_the_key_of_a_run_is_read_as_it_was_written() -> None:
    run = RunMessage.of_run("nightly-1", 1_767_229_200_000, Trigger(every_ms=HOUR_MS), 0)

    assert find_run_key(f"nightly-1 {run.key}") == run.key


def bodies() -> Iterator[bytes]:
    """Bodies of something else than a run: not JSON, other JSON, and runs with one value that they cannot have."""
    yield from (b"hello", b"", b"\xff", b"[]", b"null", b"1", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5_000)
    wrong: dict[str, list[Any]] = {
        "schedule": ["other", "", "a b", 1, None, ["report"]],
        "run_ms": [-1, 10**18, 1e308, "1", None, True, [], 1.5],
        "deliver_ms": [-1, 10**18, "1", None],
        "since_ms": [-1, 10**18, "1", None],
        "is_manual": [1, "true", None],
        "trigger": [
            None,
            {},
            [],
            "1h",
            {"every_ms": 0},
            {"every_ms": -1},
            {"every_ms": 1},
            {"every_ms": 1e3},
            {"every_ms": 10**18},
            {"every_ms": True},
            {"at_ms": 10**18},
            {"at_ms": "1"},
            {"cron": 5},
            {"cron": "x"},
            {"cron": "* * * * * * * *"},
            {"cron": ["* * * * *"]},
            {"every_ms": HOUR_MS, "at_ms": 1},
            {"every_ms": HOUR_MS, "zone": "Mars/Base"},
            {"every_ms": HOUR_MS, "zone": "../../etc/passwd"},
            {"every_ms": HOUR_MS, "zone": 5},
            {"every_ms": HOUR_MS, "zone": None},
            {"every_ms": HOUR_MS, "more": 1},
        ],
    }
    for name, values in wrong.items():
        yield from (json.dumps(VALID | {name: value}).encode() for value in values)
    yield json.dumps(VALID | {"more": 1}).encode()
    yield from (json.dumps({name: value for name, value in VALID.items() if name != left}).encode() for left in VALID)


def test_each_body_that_is_no_run_is_refused_as_a_message(
    broker: EmbeddedBroker, app: MQApplication, runs: list[ScheduledRun]
) -> None:
    """Not as an error of the library: a `MessageError` is never retried. The schedule goes on."""
    app.start()
    sent = list(bodies())
    for body in sent:
        broker.sends.send(Message(TOPIC, body, {"TAGS": "report"}), ScheduleTopic(broker)._queue_of("report"))

    harness = Harness(app, raise_handler_errors=False)
    harness.advance("2h")

    letters = harness.assert_dead_lettered(f"{TOPIC}-report")
    # One without is_manual is a run: earlier versions did not write it.
    assert len(letters) == len(sent) - 1
    assert {each.properties["dead_letter_exception"].rpartition(".")[2] for each in letters} == {"MessageError"}
    assert [run.scheduled_at.hour for run in runs][-2:] == [1, 2]


def test_a_message_with_the_key_of_a_run_and_another_body_does_not_take_its_place(
    broker: EmbeddedBroker, app: MQApplication, runs: list[ScheduledRun]
) -> None:
    """The first message with the key of a run counts; any other message does not count."""
    app.start()
    key = RunMessage.of_run("report", VALID["run_ms"], Trigger(every_ms=HOUR_MS), 0).key
    broker.sends.send(Message(TOPIC, b"no run", {"KEYS": str(key)}), ScheduleTopic(broker)._queue_of("report"))

    Harness(app, raise_handler_errors=False).advance("2h")

    assert [run.scheduled_at.hour for run in runs] == [1, 2]


def test_a_pause_that_another_program_stored_is_listed(broker: EmbeddedBroker, app: MQApplication) -> None:
    """Its end may be any number that an offset can be."""
    app.start()
    broker.groups.commit_offset(f"{TOPIC}-report-paused", ScheduleTopic(broker)._queue_of("report"), (1 << 63) - 1)

    [state] = app.get(Schedules).list()

    assert state.paused_until == datetime.max.replace(tzinfo=UTC)
