"""Current message of a handler, in code and in log events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mqtemplate.listener import add_current_message, current_group, current_message, current_messages
from mqtemplate.listener.handler.current import CURRENT

if TYPE_CHECKING:
    from tests.listener.conftest import MakeMessage


def test_outside_of_handlers_there_is_no_current_message_and_events_stay_unchanged() -> None:
    assert (current_message(), current_messages(), current_group()) == (None, (), None)
    assert add_current_message(None, "info", {"event": "x"}) == {"event": "x"}


@pytest.mark.feature("C8")
def test_events_get_the_fields_of_the_current_message(make_message: MakeMessage) -> None:
    """Events of a handler and of the libraries below it."""
    message = make_message(properties={"TAGS": "paid", "UNIQ_KEY": "ABC"})
    token = CURRENT.set(("billing", message))
    try:
        event = add_current_message(None, "info", {"event": "x", "topic": "mine"})
    finally:
        CURRENT.reset(token)

    assert event == {"event": "x", "topic": "mine", "group": "billing", "tag": "paid", "msg_id": "ABC", "attempt": 1}


def test_a_batch_of_several_messages_has_no_single_current_message(make_message: MakeMessage) -> None:
    messages = [make_message(), make_message(offset=1)]
    token = CURRENT.set(("billing", messages))
    try:
        assert current_message() is None
        assert current_messages() == messages
        assert add_current_message(None, "info", {}) == {"group": "billing", "batch_size": 2}
    finally:
        CURRENT.reset(token)
