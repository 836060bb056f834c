"""Golden scripts: the options of a send and the message that the broker gets; and sessions with a template."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate import (
    EmbeddedBroker,
    Message,
    Outgoing,
    RocketMQTemplate,
)
from mqtemplate.errors import MessageDroppedError, MessageError
from tests.golden import check_script, scripts_in
from tests.template.session import NAMES, TemplateSession

SCRIPTS = scripts_in(Path(__file__).parent / "scripts")
SESSIONS = scripts_in(Path(__file__).parent / "exchanges")


class Catching:
    """Middleware that catches each message and sends nothing."""

    def __init__(self) -> None:
        self.caught: list[Message] = []

    def send(self, outgoing: Outgoing) -> Generator[Outgoing, object, None]:
        self.caught.append(outgoing.message)
        yield from ()


class Commands:
    """``send``: a destination, and options as expressions of Python. It prints properties and flag, or the error."""

    def __init__(self, template: RocketMQTemplate, caught: list[Message]) -> None:
        self._template = template
        self._caught = caught

    def send(self, destination: str, payload: str = 'b"body"', **options: str) -> list[str]:
        given = {name: _value(text) for name, text in options.items()}
        try:
            self._template.sync_send(destination, _value(payload), **given)
        except MessageDroppedError:
            message = self._caught.pop()
            flag = f" flag={message.flag}" if message.flag else ""
            return [f"{dict(sorted(message.properties.items()))}{flag}"]
        except MessageError as error:
            return [f"{type(error).__name__}: {error}"]
        raise AssertionError("the middleware let the message pass")


def _value(text: str) -> object:
    return eval(text, dict(NAMES))


@pytest.mark.feature("A18", "B12", "B13", "G2", "G4", "G9")
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_the_options_of_a_send_do_as_the_script_says(script: Path, mqtemplate_broker: EmbeddedBroker) -> None:
    catching = Catching()

    check_script(script, Commands(RocketMQTemplate(mqtemplate_broker, middlewares=[catching]), catching.caught))


@pytest.mark.feature("A3", "A5", "A6", "A8", "A17", "A19", "C1", "G1", "G9", "U9", "spring-v5")
@pytest.mark.parametrize("script", SESSIONS, ids=[path.stem for path in SESSIONS])
def test_a_template_does_as_the_script_says(script: Path) -> None:
    with contextlib.ExitStack() as undo, capture_logs() as logs:
        check_script(script, TemplateSession(undo, logs))
