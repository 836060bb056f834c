"""Bodies and headers that one account repeats: they neither fill the log, nor bring control characters into it."""

from __future__ import annotations

import io
import json
import logging
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.context.logging import event_formatter
from mqtemplate.event_log import EventLogger, LimitedLog, get_logger
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.server import Account, AclSettings, BrokerServer, BrokerServerSettings, Right
from tests.server.serving import SECRET
from tests.server.tool import ANY_PORT, Tool, make_engine

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
ACCOUNT = Account(
    access_key="one-account",
    secret_key=SECRET,
    topic_perms={"mine": Right.PUB | Right.SUB},
    group_perms={"my-group": Right.SUB},
)
DEEP = "[" * 20_000
LONG = "x" * 20_000
CONSUMER = '{"groupName":"my-group","subscriptionDataSet":[]}'
BODIES = [
    '{"clientID":1e999}',
    '{"clientID":-1e999,"consumerDataSet":[%s]}'.replace("%s", CONSUMER),
    '{"clientID":NaN}',
    '{"clientID":Infinity}',
    '{"clientID":%s}'.replace("%s", ("9" * 5_000)),
    '{"clientID":["%s"]}'.replace("%s", LONG),
    '{"clientID":%s'.replace("%s", DEEP),
    '{"clientID":"a","clientID":1e999}',
    '{"clientID":"c","heartbeatFingerprint":1e999}',
    '{"clientID":"c","consumerDataSet":[{"groupName":1e999}]}',
    '{"clientID":"c","consumerDataSet":{"%s":1}}'.replace("%s", LONG),
    '{"clientID":"c","consumerDataSet":[{"groupName":"my-group","consumeType":{"a":1e999}}]}',
    '{"clientID":"c","producerDataSet":[{"groupName":"%s"}]}'.replace("%s", json.dumps(ESCAPE)[1:-1]),
    '{"clientID":"%s","producerDataSet":[{"groupName":"p"}]}'.replace("%s", json.dumps(ESCAPE)[1:-1]),
    '{{"a":1e999}:1}',
    '{{"a":1,"a":"b"}:{"c":NaN}}',
    "{1e999:1}",
    "1e999",
    "null",
    "",
    "\ud800".encode("utf-16", "surrogatepass").decode("latin-1"),
]
HEADERS = [
    '{"code":10,"opaque":1,"extFields":{"a":%s}}'.replace("%s", ("[" * 900 + "]" * 900)),
    '{"code":10,"opaque":1,"extFields":%s}'.replace("%s", ("[" * 900 + "]" * 900)),
    '{"code":10,"opaque":1,"remark":%s}'.replace("%s", ("[" * 900 + "]" * 900)),
    '{"code":%s,"opaque":1}'.replace("%s", ("[" * 900 + "]" * 900)),
    "[" * 900 + "]" * 900,
    '{"code":10,"opaque":1e999}',
    '{"code":10,"opaque":1,"extFields":{"a":1e999,"b":NaN,"c":%s}}'.replace("%s", ("9" * 5_000)),
    '{"code":10,"opaque":1,"remark":"%s"}'.replace("%s", json.dumps(ESCAPE)[1:-1]),
    '{"code":34,"opaque":1,"remark":"%s"}'.replace("%s", LONG),
    '{"code":10,"opaque":1,"language":{"a":[]},"version":"x"}',
    '{"code":10,"code":1e999,"opaque":1}',
    '{"code":10,"opaque":1,"extFields":{"topic":"%s","b":null}}'.replace("%s", json.dumps(ESCAPE)[1:-1]),
]


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Text of each log record from WARNING on, as the command line writes it."""
    stream = io.StringIO()
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(formatter.format(record))

    formatter, handler = event_formatter("CONSOLE"), Handler(logging.WARNING)
    logger = logging.getLogger("mqtemplate")
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)
    stream.close()


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    engine = make_engine(VirtualClock())
    settings = BrokerServerSettings(listen=ANY_PORT)
    with BrokerServer(engine, settings, acl=AclSettings(accounts=(ACCOUNT,))) as server:
        yield server
    engine.close()


def check(lines: list[str]) -> None:
    """No event has more than the lines of a period, none is an unexpected error, and none is long or has controls."""
    events = Counter(line.split("] ", 1)[-1].split(" ", 1)[0] for line in lines)
    assert not [line for line in lines if "Traceback" in line]
    assert max(events.values(), default=0) <= 10
    assert all(line.isprintable() and len(line) < 3_000 for line in lines)


def ask(tool: Tool, code: RequestCode, body: str) -> RemotingCommand:
    """Return the response to a signed request."""
    request = RemotingCommand.request(code, body=body.encode("utf-8", "replace"))
    sign_command(request, ACCOUNT.access_key, SECRET)
    return tool.send_request(request)


def test_bad_bodies_of_one_account_are_refused_and_fill_no_log(server: BrokerServer, lines: list[str]) -> None:
    """Each response has a reason. `1e999` is a number that JSON permits and no reader expects."""
    codes = [RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ, RequestCode.CHECK_CLIENT_CONFIG]
    with Tool(server.address) as tool:
        for code, body in product(codes, BODIES):
            for _ in range(12):
                response = ask(tool, code, body)
                assert response.code == ResponseCode.SUCCESS or response.remark
                assert response.code != ResponseCode.SYSTEM_ERROR, (body[:60], response)
        named = ask(tool, RequestCode.HEART_BEAT, BODIES[0])

    check(lines)
    assert named.code == ResponseCode.INVALID_PARAMETER
    assert named.remark == "the body is not a HeartbeatData: clientID must be a text, got inf"


def test_bad_headers_of_a_peer_without_account_fill_no_log(server: BrokerServer, lines: list[str]) -> None:
    """They reach the server before any signature is checked."""
    for header in HEADERS:
        data = header.encode()
        for _ in range(12):
            with socket.create_connection((server.address.ip, server.address.port), timeout=10) as sock:
                sock.sendall(struct.pack(">iI", 4 + len(data), len(data)) + data)
                assert sock.recv(1 << 16) is not None

    check(lines)


# --- the log of what peers cause ------------------------------------------------------------------------


@pytest.fixture
def peers() -> Iterator[tuple[logging.StreamHandler[io.StringIO], io.StringIO]]:
    """The handler of a log, with Python's own formatter, and what it writes."""
    stream, logger = io.StringIO(), logging.getLogger("mqtemplate.peers")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.propagate = False
    yield handler, stream
    logger.removeHandler(handler)
    logger.propagate = True


def test_fields_and_errors_of_peers_have_no_control_characters(peers: tuple[object, io.StringIO]) -> None:
    log, stream = LimitedLog(EventLogger(logging.getLogger("mqtemplate.peers"), {}), lambda: 0), peers[1]
    error = ValueError(f"bad {ESCAPE}\nFAKE line")

    log.log(logging.ERROR, "peer.failed", client=ESCAPE, groups=[ESCAPE], text=f"{ESCAPE} {LONG}", exc_info=error)

    text = stream.getvalue()
    assert all(line.isprintable() for line in text.splitlines())
    assert r"\x1b]0;owned\x07\x1b[2J" in text
    assert r"ValueError: bad \x1b]0;owned\x07\x1b[2J\nFAKE line" in text
    assert "(20015 characters)" in text
    assert len(text) < 2_000


def test_the_console_format_escapes_control_characters_of_all_events(
    peers: tuple[logging.StreamHandler[io.StringIO], io.StringIO],
) -> None:
    """structlog quotes a text with blanks only."""
    handler, stream = peers
    handler.setFormatter(event_formatter("CONSOLE"))
    try:
        raise ValueError(ESCAPE)
    except ValueError:
        get_logger("mqtemplate.peers").exception("peer.failed", client=ESCAPE)

    assert all(line.isprintable() for line in stream.getvalue().splitlines())
    assert stream.getvalue().count(r"\x1b]0;owned\x07") == 2
