"""The answer of a broker about its delays: it may be any program."""

from __future__ import annotations

import pytest

from mqtemplate.brokers.remote.delayed.backlog import DelayConfig
from mqtemplate.errors import MQTemplateError

GOOD = {
    "messageDelayLevel": "1s 2s",
    "timerPrecisionMs": "1000",
    "timerRollWindowSlot": "172800",
    "timerMaxDelaySec": "259200",
}


def answer(**changed: str | None) -> str:
    return "".join(f"{name}={value}\n" for name, value in {**GOOD, **changed}.items() if value is not None)


def test_levels_and_timers_are_read() -> None:
    config = DelayConfig.parse(answer())

    assert (config.levels.delays_ms, config.slot_ms, config.timer_age_ms) == ((1_000, 2_000), 1_000, 172_800_000)


@pytest.mark.parametrize("text", [None, "", "x", "[1]", "{", "[" * 100_000])
def test_shapes_of_topics_that_are_no_table_are_none(text: str | None) -> None:
    assert DelayConfig.parse(answer(topicShapes=text)).shapes == {}


@pytest.mark.parametrize("name", ["timerPrecisionMs", "timerRollWindowSlot", "timerMaxDelaySec"])
@pytest.mark.parametrize("value", ["0", "-1", "", "x", "1e3", "9" * 5_000, "\u0663"])
def test_a_number_that_is_none_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number above 0, got '{value[:10]}"):
        DelayConfig.parse(answer(**{name: value}))


@pytest.mark.parametrize("levels", [None, "", "soon"])
def test_missing_levels_are_an_error_of_the_library(levels: str | None) -> None:
    with pytest.raises(MQTemplateError):
        DelayConfig.parse(answer(messageDelayLevel=levels))
