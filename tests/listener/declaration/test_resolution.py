"""Resolution: from the attributes of a decorator to the settings of a listener; schedules of retries; results."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mqtemplate import Backoff, BatchFailure, ConsumeStatus, Send
from mqtemplate.durations import format_ms
from mqtemplate.listener import ListenerSettings, ListenerSpec, default_resolve, resolve_spec
from mqtemplate.listener.declaration.decorator import MESSAGE_LISTENER
from mqtemplate.listener.declaration.settings import retry_delay_ms
from mqtemplate.listener.handler.results import failed_indices, is_batch_done, is_done
from mqtemplate.selectors.sql92 import Sql92Selector
from tests.golden import check_script
from tests.sessions import Session

NOW_MS = 1_767_225_600_000


def spec(topics: tuple[str, ...] = ("orders",), consumer_group: str = "billing", **attributes: Any) -> ListenerSpec:
    return ListenerSpec(topics=topics, consumer_group=consumer_group, attributes=attributes)


def resolved(**attributes: Any) -> ListenerSettings:
    return resolve_spec(spec(**attributes))


def resolver(**values: str) -> Any:
    """Return a function that replaces these keys, and others by their defaults; ``__`` means a dot, ``_`` a dash."""

    def resolve(text: str) -> str:
        for key, value in values.items():
            name = key.replace("__", ".").replace("_", "-")
            text = text.replace(f"${{{name}}}", value).replace(f"${{{name}:}}", value)
        return default_resolve(text)

    return resolve


def on_a_cluster(own: dict[str, str], **attributes: Any) -> ListenerSettings:
    return resolve_spec(spec(**attributes), resolver(rocketmq__name_server="10.0.0.1:9876", **own))


def defaults() -> dict[str, Any]:
    """Return the attributes of a decorator without any; placeholders of texts stay."""

    def resolve(text: str) -> str:
        if "enable-msg-trace" in text:
            return "false"
        return "1000" if "await-termination" in text or "invisible-duration" in text else text

    return MESSAGE_LISTENER.read("listener t", spec(), resolve)


@pytest.mark.feature("X8")  # partial acknowledgement
def test_values_of_listeners_are_as_the_script_says() -> None:
    own = (
        Backoff,
        BatchFailure,
        Random,
        Send,
        Sql92Selector,
        datetime,
        default_resolve,
        defaults,
        failed_indices,
        format_ms,
    )
    own += (is_batch_done, is_done, on_a_cluster, resolve_spec, resolved, resolver, retry_delay_ms, spec)
    names = {each.__name__: each for each in own} | {"NOW_MS": NOW_MS} | dict(ConsumeStatus.__members__)

    check_script(Path(__file__).parent / "values.script", Session(names))
