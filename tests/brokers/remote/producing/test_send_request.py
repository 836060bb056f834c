"""Send requests: ids, properties, delays, compression, and refused messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers.remote.cluster.settings import Namespace, RemoteSettings
from mqtemplate.brokers.remote.producing.send_request import SendRequest, SendRequestFactory
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, DestinationError, MessageError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.record.compression import decompress_body
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.messages import decode_batch, decode_properties_text
from tests.golden import check_script

QUEUE = MessageQueue("orders", "broker-a", 3)


def factory(**settings: Any) -> SendRequestFactory:
    values = RemoteSettings(name_servers=("127.0.0.1:9876",), **settings)
    return SendRequestFactory(values, Namespace(values.namespace), VirtualClock())


def properties_of(request: SendRequest) -> dict[str, str]:
    return decode_properties_text(request.properties)


class Requests:
    """The commands of the script. A word ``text*3`` is a text three times."""

    def __init__(self) -> None:
        self._factory = factory()

    def settings(self, **values: str) -> Iterator[str]:
        try:
            self._factory = factory(
                **{name: int(value) if value.isdecimal() else value for name, value in values.items()}
            )
        except ConfigurationError as exc:
            yield str(exc)

    def single(self, topic: str, body: str = "x", flag: str = "0", **properties: str) -> Iterator[str]:
        yield from self._shown(lambda: self._factory.single(message(topic, body, flag, properties)))

    def half(self, group: str, **properties: str) -> Iterator[str]:
        yield from self._shown(
            lambda: self._factory.single(message("orders", "x", "0", properties), transaction_group=group)
        )

    def batch(self, *names: str, **properties: str) -> Iterator[str]:
        """Send messages ``topic/body``; the first one has the properties."""
        messages = [message(*name.split("/"), "0", {} if at else properties) for at, name in enumerate(names)]
        yield from self._shown(lambda: self._factory.batch(messages))

    def reply(self, topic: str, **properties: str) -> Iterator[str]:
        yield from self._shown(lambda: self._factory.reply(topic, b"x", properties))

    def _shown(self, create: Callable[[], SendRequest]) -> Iterator[str]:
        """Print the header without times and properties, the body with its properties, and what a broker needs."""
        try:
            request = create()
        except (MessageError, DestinationError) as exc:
            yield f"{type(exc).__name__}: {exc}"
            return
        command = request.command(QUEUE)
        fields = command.header(SendMessageRequestHeaderV2).to_ext_fields()
        assert fields.pop("g") == str(VirtualClock().now_ms())
        properties = decode_properties_text(fields.pop("i"))
        marks = [name for name in ("is_immediate", "has_timer", "is_half") if getattr(request, name)]
        needs = [f"needs {request.needs.name}"] if request.needs else []
        yield " ".join([RequestCode(command.code).name, *(f"{name}={text}" for name, text in fields.items())])
        body = decompress_body(request.body, request.sys_flag)
        if request.code == RequestCode.SEND_BATCH_MESSAGE:
            for each, msg_id in zip(decode_batch(body, request.topic), request.msg_ids, strict=True):
                yield f"  {each.body.decode()} {_properties(each.properties, msg_id)}"
        else:
            yield f"  {len(body)} bytes{', compressed' if len(request.body) < len(body) else ''}"
        yield "; ".join([f"  {_properties(properties, request.msg_id)}", *marks, *needs])


def message(topic: str, body: str, flag: str, properties: dict[str, str]) -> Message:
    texts = {name: _repeated(value) for name, value in properties.items()}
    return Message(topic, _repeated(body).encode(), texts, int(flag))


def _repeated(word: str) -> str:
    text, star, times = word.partition("*")
    return text * int(times) if star else text


def _properties(properties: dict[str, str], msg_id: str) -> str:
    return " ".join(f"{name}={'<id>' if text == msg_id else text}" for name, text in properties.items())


def test_requests_are_as_the_script_says() -> None:
    """Properties, delays, compression, and refused messages."""
    check_script(Path(__file__).with_name("scripts") / "send_requests.script", Requests())


def test_each_send_has_a_new_id_and_does_not_change_the_message() -> None:
    message = Message("orders", b"body", {"region": "EU"})

    first, second = factory().single(message), factory().single(message)

    assert message.properties == {"region": "EU"}
    assert first.msg_id != second.msg_id


def test_the_settings_need_a_name_server() -> None:
    with pytest.raises(ConfigurationError, match="needs the address of a name server"):
        RemoteSettings(name_servers=())


# --- messages that may be sent with others ----------------------------------------------------------


@pytest.mark.parametrize(
    "properties", [{}, {Property.TAGS: "paid", "region": "EU-ß"}, {Property.UNIQ_KEY: "A1"}, {"copy": "x" * 40}]
)
@pytest.mark.parametrize("namespace", ["", "team"])
def test_a_message_has_the_same_properties_with_others_and_alone(properties: dict[str, str], namespace: str) -> None:
    """Also the second one with the same properties, which stay encoded."""
    requests = factory(namespace=namespace)
    for _ in range(2):
        part = requests.joinable(Message("orders", b"body", dict(properties), flag=3))
        (together,) = decode_batch(requests.joined([part]).body, "orders")
        alone = requests.alone(part)

        assert (together.body, together.flag, alone.body, alone.flag) == (b"body", 3, b"body", 3)
        assert together.properties == properties_of(alone)
        assert together.properties[Property.UNIQ_KEY] == part.msg_id == alone.msg_id


def test_messages_with_equal_properties_have_ids_of_their_own() -> None:
    requests = factory()
    parts = [requests.joinable(Message("orders", b"x", {"region": "EU"})) for _ in range(3)]

    found = [each.properties for part in parts for each in decode_batch(part.data, "orders")]

    assert [each[Property.UNIQ_KEY] for each in found] == [part.msg_id for part in parts]
    assert len({part.msg_id for part in parts}) == 3


def test_a_change_of_a_message_after_its_send_changes_no_part() -> None:
    requests, message = factory(), Message("orders", b"x", {"region": "EU"})
    first, second = requests.joinable(message), requests.joinable(message)

    message.properties["region"] = "US"
    third = requests.joinable(message)

    parts = (first, second, third)
    sent = [each.properties["region"] for part in parts for each in decode_batch(part.data, "orders")]
    assert [properties_of(requests.alone(part))["region"] for part in parts] == sent == ["EU", "EU", "US"]
