"""The options that all sending verbs share."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate, messages_in

VERBS: dict[str, tuple[Any, ...]] = {
    # verb -> arguments before the options
    "sync_send": (),
    "async_send": (),
    "send_one_way": (),
    "send_in_transaction": (),
    "send_and_receive": (bytes,),
    "async_send_and_receive": (bytes,),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("given", "nearest"),
    [("delya", "delay"), ("hashKey", "hash_key"), ("header", "headers"), ("delay_levels", "delay_level")],
)
def test_the_error_for_an_unknown_option_names_the_nearest_one(
    mqtemplate_template: RecordingTemplate, mqtemplate_broker: EmbeddedBroker, verb: str, given: str, nearest: str
) -> None:
    with pytest.raises(TypeError, match=rf"\(\) has no option '{given}'; did you mean '{nearest}'\?"):
        getattr(mqtemplate_template, verb)("orders", b"body", *VERBS[verb], **{given: "x"})

    assert messages_in(mqtemplate_broker, "orders") == []


def test_the_error_for_an_unknown_option_names_verb_and_options_if_none_is_near(
    mqtemplate_template: RecordingTemplate,
) -> None:
    with pytest.raises(TypeError) as refusal:
        mqtemplate_template.sync_send("orders", b"body", priority=9)

    assert str(refusal.value) == (
        "sync_send() has no option 'priority'; it has destination, payload, timeout, delay_level, "
        "delay, deliver_at, hash_key, headers, keys, queue"
    )


def test_an_option_of_one_verb_is_not_suggested_for_another(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(TypeError, match=r"async_send\(\) has no option 'on_succes'; did you mean 'on_success'"):
        mqtemplate_template.async_send("orders", b"body", on_succes=print)
    with pytest.raises(TypeError, match=r"sync_send\(\) has no option 'on_success'; it has"):
        mqtemplate_template.sync_send("orders", b"body", on_success=print)


def test_the_repr_of_a_template_names_broker_and_converter(mqtemplate_broker: EmbeddedBroker) -> None:
    text = repr(RocketMQTemplate(mqtemplate_broker))

    assert text == "RocketMQTemplate(broker='broker-a', converter=JsonMessageConverter())"
