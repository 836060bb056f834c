"""Signatures of the sending verbs, as ``help()``, IPython and notebooks show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from mqtemplate import RocketMQTemplate, Send, publishes
from mqtemplate.template import SendOptions

VERBS = [
    RocketMQTemplate.sync_send,
    RocketMQTemplate.async_send,
    RocketMQTemplate.send_one_way,
    RocketMQTemplate.send_and_receive,
    RocketMQTemplate.async_send_and_receive,
    RocketMQTemplate.send_in_transaction,
    RocketMQTemplate.async_send_in_transaction,
    Send,
    publishes,
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_signature_names_each_send_option(verb: Callable[..., object]) -> None:
    """With its type and as a keyword, in place of ``**options``."""
    parameters = inspect.signature(verb).parameters

    assert list(parameters)[-len(SendOptions.__annotations__) :] == list(SendOptions.__annotations__)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in SendOptions.__annotations__)
    assert parameters["delay"].annotation == "Duration | None"
    assert (parameters["delay"].default, parameters["keys"].default) == (None, ())


def test_help_shows_the_options() -> None:
    import pydoc

    shown = pydoc.plain(pydoc.render_doc(RocketMQTemplate.sync_send))

    assert "deliver_at: 'datetime | int | None' = None" in shown
    assert "**options" not in shown.splitlines()[2]
