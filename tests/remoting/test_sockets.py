"""Addresses as text, and as sockets report them."""

from __future__ import annotations

import pytest

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.sockets import AddressMap, parse_address, peer_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:10911", HostAddress("127.0.0.1", 10_911)),
        (" broker-a.example.org:9876 ", HostAddress("broker-a.example.org", 9_876)),
        ("[::1]:10911", HostAddress("::1", 10_911)),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, expected: HostAddress) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "localhost", ":9876", "localhost:", "localhost:http", "::1:9876", "a:65536", "a:-1", "a:٣"]
)
def test_another_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write host:port.*\[::1\]:10911") as raised:
        parse_address(text)

    assert repr(text) in str(raised.value)


def test_a_port_of_thousands_of_digits_is_refused_in_a_short_text() -> None:
    with pytest.raises(ConfigurationError, match=r"write host:port") as raised:
        parse_address("a:" + "9" * 5_000)

    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("sockaddr", "expected"),
    [
        (("10.0.0.7", 51_000), "10.0.0.7:51000"),
        (("::ffff:10.0.0.7", 51_000, 0, 0), "10.0.0.7:51000"),
        (("::1", 51_000, 0, 0), "[::1]:51000"),
        (("fe80::1%eth0", 51_000, 0, 2), "[fe80::1]:51000"),
    ],
)
def test_the_address_of_a_peer_has_the_form_that_records_store(sockaddr: tuple[str, int], expected: str) -> None:
    """A born host has 4 or 16 bytes. An IPv4 address that a dual-stack socket maps to IPv6 must have 4."""
    assert str(peer_address(sockaddr)) == expected


# --- addresses of other networks --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "registered", "expected"),
    [
        ({}, "172.18.0.3:10911", "172.18.0.3:10911"),
        ({"172.18.*": "localhost:{port}"}, "172.18.0.3:10911", "localhost:10911"),
        ({"172.18.*": "localhost"}, "172.18.0.3:10911", "localhost:10911"),
        ({"172.18.*": "localhost"}, "172.19.0.3:10911", "172.19.0.3:10911"),
        ({"172.18.*:10911": "mq.example.org:31911"}, "172.18.0.3:10911", "mq.example.org:31911"),
        ({"172.18.*:10911": "mq.example.org:31911"}, "172.18.0.3:10912", "172.18.0.3:10912"),
        ({"Broker-0": "10.0.0.5:31911"}, "broker-0:10911", "10.0.0.5:31911"),
        ({"broker-?": "10.0.0.5"}, "broker-0:10911", "broker-0:10911"),
        ({"broker-*": "{host}.mq.example.org:{port}"}, "broker-0:10911", "broker-0.mq.example.org:10911"),
        ({"*:*": "localhost", "172.18.0.3": "10.0.0.5"}, "172.18.0.3:10911", "10.0.0.5:10911"),
        ({"172.*": "first", "172.18.*": "second"}, "172.18.0.3:10911", "first:10911"),
        ({"fd00::3": "::1"}, "[fd00::3]:10911", "[::1]:10911"),
        ({"[fd00::*]:10911": "[::1]:1"}, "[fd00::3]:10911", "[::1]:1"),
        ({"[fd00::3]": "localhost"}, "[fd00::3]:10911", "localhost:10911"),
    ],
    ids=range(14),
)
def test_a_registered_address_is_mapped_to_the_one_that_is_reached(
    entries: dict[str, str], registered: str, expected: str
) -> None:
    assert AddressMap(entries)(registered) == expected


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"": "localhost"}, "'' is no address that brokers register; write host or host:port, with *"),
        ({"a b": "localhost"}, "'a b' is no address that brokers register"),
        ({"broker-0": ""}, "'broker-0' has '', which is no address; write host, host:port, or either"),
        ({"broker-0": "localhost:http"}, "'broker-0' has 'localhost:http', which is no address"),
        ({"broker-0": "localhost:99999"}, "'broker-0' has 'localhost:99999', which is no address"),
        ({"broker-0": "{name}:1"}, "'broker-0' has '{name}:1', which is no address"),
    ],
    ids=range(6),
)
def test_an_entry_that_is_no_address_is_refused(entries: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        AddressMap(entries)

    assert text in str(raised.value)
