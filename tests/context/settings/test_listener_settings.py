"""The section ``mqtemplate.listener.*``: the retry policy of listeners that have none of their own."""

from __future__ import annotations

import pytest

from mqtemplate import Backoff, MQApplication, VirtualClock, message_listener
from mqtemplate.listener.declaration.settings import RetryDelays
from mqtemplate.testing import Harness
from tests.context.loading import Load, Refusal

SECTION = "mqtemplate:\n  listener:\n"


@pytest.mark.parametrize("text", ["[5s, 1m, 1h]", "5s,1m,1h", "[5, 60, 3600]"])
def test_the_delays_of_retries_are_read(load: Load, text: str) -> None:
    settings = load(f"{SECTION}    retry: {text}\n")

    assert settings.mqtemplate.listener.retry_defaults.retry == RetryDelays((5_000, 60_000, 3_600_000))


def test_an_exponential_schedule_is_read(load: Load) -> None:
    settings = load(f"{SECTION}    backoff: {{first: 2s, factor: 3, maximum: 5m, jitter: 0, attempts: 4}}\n")

    assert settings.mqtemplate.listener.retry_defaults.retry == Backoff(
        "2s", factor=3, maximum="5m", jitter=0, attempts=4
    )


def test_exceptions_are_named(load: Load) -> None:
    settings = load(f"{SECTION}    not-retry-for: [ValueError, json.JSONDecodeError]\n    retry-for: OSError\n")

    defaults = settings.mqtemplate.listener.retry_defaults
    assert [kind.__name__ for kind in defaults.not_retry_for] == ["ValueError", "JSONDecodeError"]
    assert defaults.retry_for == (OSError,)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("    retry: [5s, soon]\n", "application.yml:3: mqtemplate.listener.retry: "),
        ("    retry: [5s, soon]\n", "must be a duration: '3h', '1h 30m', '250ms'"),
        ("    backoff: {first: soon}\n", "mqtemplate.listener.backoff.first: "),
        ("    backoff: {first: 2h}\n", "first must be a delay of 1 ms or more and at most the maximum, got '2h'"),
        ("    retry: [5s]\n    backoff: {first: 1s}\n", "are two schedules of retries; keep one"),
        ("    not-retry-for: [shop.Missing]\n", "must be names of exceptions, such as ValueError or shop.errors."),
        ("    not-retry-for: [print]\n", "must be names of exceptions, such as ValueError or shop.errors."),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_is_allowed(refusal: Refusal, lines: str, expected: str) -> None:
    assert expected in refusal(SECTION + lines)


def test_listeners_without_a_policy_of_their_own_use_it() -> None:
    clock = VirtualClock()
    start_ms = clock.now_ms()
    tries: dict[str, list[int]] = {"default": [], "own": [], "level": []}

    def fail(name: str) -> None:
        tries[name].append(clock.now_ms() - start_ms)
        raise RuntimeError("no")

    @message_listener(topic="orders", consumer_group="default")
    def default(message: str) -> None:
        fail("default")

    @message_listener(topic="orders", consumer_group="own", retry=["3s"])
    def own(message: str) -> None:
        fail("own")

    @message_listener(topic="orders", consumer_group="level", delay_level_when_next_consume=1, max_reconsume_times=2)
    def level(message: str) -> None:
        fail("level")

    settings = {"rocketmq.name-server": "embedded:memory", "mqtemplate.listener.retry": ["7s", "90s"]}
    with MQApplication(default, own, level, settings=settings, clock=clock) as app:
        app.template.sync_send("orders", "bad")
        Harness(app, raise_handler_errors=False).advance("10m")

    assert tries == {"default": [0, 7_000, 97_000], "own": [0, 3_000], "level": [0, 1_000, 2_000]}
