"""Header coding: the functions that `headers/fields.py` generates, and a plain loop over the fields, in ns per header.

The headers are from the hot path: a send, its response, a pull, its response. The plain loop uses the same
declarations. Whole frames are coded too: bytes to a command with its header, and back.

    python -m bench.header_coding [--count 20000]
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import timeit
from collections.abc import Callable, Mapping
from typing import Any

from bench.measure import report, run
from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol import FrameDecoder, RemotingCommand, RequestCode, encode_command
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, _plan_of
from mqtemplate.remoting.protocol.headers.message import (
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)

_ROUNDS = 15

SEND = SendMessageRequestHeaderV2(
    producer_group="bench",
    topic="orders",
    default_topic="TBW102",
    default_topic_queue_nums=4,
    queue_id=3,
    sys_flag=0,
    born_timestamp=1_767_225_600_000,
    flag=0,
    properties="KEYS\x014466\x02UNIQ_KEY\x017F00000100002A9F0000000000001234\x02WAIT\x01true\x02",
    reconsume_times=0,
    unit_mode=False,
    batch=False,
    broker_name="broker-a",
)
SENT = SendMessageResponseHeader(
    msg_id="7F00000100002A9F0000000000001234",
    queue_id=3,
    queue_offset=1_234_567,
    transaction_id="7F0000010000000000000000000000AB",
    msg_region="DefaultRegion",
    trace_on="true",
)
PULL = PullMessageRequestHeader(
    consumer_group="bench",
    topic="orders",
    queue_id=3,
    queue_offset=1_234_567,
    max_msg_nums=32,
    sys_flag=3,
    commit_offset=1_234_560,
    suspend_timeout_millis=15_000,
    subscription="*",
    sub_version=1_767_225_600_000,
    expression_type="TAG",
    broker_name="broker-a",
)
PULLED = PullMessageResponseHeader(
    suggest_which_broker_id=0, next_begin_offset=1_234_599, min_offset=0, max_offset=1_300_000
)


# --- the plain loop ---------------------------------------------------------------------------------


class PlainLoop:
    """Reader and writer of one kind of header, without generated code."""

    def __init__(self, kind: type[CommandHeader]) -> None:
        self._kind = kind
        self._fields = [(entry.name, entry.attribute, *self._codec(entry), entry.default) for entry in _plan_of(kind)]

    @staticmethod
    def _codec(entry: Any) -> tuple[Callable[[str], Any], Callable[[Any], str]]:
        if entry.kind.bits:
            limit = 1 << entry.kind.bits - 1

            def read_int(text: str) -> int:
                number = int(text)
                if not -limit <= number < limit:
                    raise ValueError(text)
                return number

            return read_int, str
        if entry.kind.name == "true or false":
            return lambda text: text.lower() == "true", lambda value: "true" if value else "false"
        return lambda text: text, lambda value: value

    def read(self, ext_fields: Mapping[str, str]) -> CommandHeader:
        values = {}
        for name, attribute, read, _, default in self._fields:
            text = ext_fields.get(name)
            try:
                if text is not None:
                    values[attribute] = read(text)
                elif default is dataclasses.MISSING:
                    raise ValueError(name)
                else:
                    values[attribute] = default
            except ValueError as exc:
                raise RemoteProtocolError(str(exc)) from None
        header = object.__new__(self._kind)
        header.__dict__.update(values)
        return header

    def write(self, header: CommandHeader) -> dict[str, str]:
        ext_fields = {}
        for name, attribute, _, write, _ in self._fields:
            value = getattr(header, attribute)
            if value is not None:
                ext_fields[name] = write(value)
        return ext_fields


# --- measuring --------------------------------------------------------------------------------------


def time_ns(work: Callable[[], object], count: int) -> float:
    """Return nanoseconds of processor time per call: the best of several rounds, since other processes disturb."""
    return min(timeit.repeat(work, number=count, repeat=_ROUNDS, timer=time.process_time)) / count * 1e9


def compare(what: str, header: CommandHeader, count: int) -> None:
    kind, ext_fields, plain = type(header), header.to_ext_fields(), PlainLoop(type(header))
    assert plain.read(ext_fields) == header == kind.from_ext_fields(ext_fields)
    assert plain.write(header) == ext_fields
    generated = time_ns(lambda: kind.from_ext_fields(ext_fields), count)
    report(f"{what}: read, generated", generated, "ns", "none")
    report(f"{what}: read, plain loop", time_ns(lambda: plain.read(ext_fields), count), "ns", "slower")
    report(f"{what}: write, generated", time_ns(header.to_ext_fields, count), "ns", "none")
    report(f"{what}: write, plain loop", time_ns(lambda: plain.write(header), count), "ns", "slower")


def time_frames(what: str, code: int, header: CommandHeader, body: bytes, count: int) -> None:
    decoder, kind = FrameDecoder(), type(header)
    frame = encode_command(RemotingCommand.request(code, header, body))

    def decode() -> None:
        decoder.feed(frame)
        command = decoder.next_command()
        assert command is not None
        command.header(kind)

    report(f"{what}: whole frame, decode", time_ns(decode, count), "ns", "none")
    encode = time_ns(lambda: encode_command(RemotingCommand.request(code, header, body)), count)
    report(f"{what}: whole frame, encode", encode, "ns", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5_000)
    count = parser.parse_args().count
    compare("send request", SEND, count)
    compare("send response", SENT, count)
    compare("pull request", PULL, count)
    compare("pull response", PULLED, count)
    time_frames("send of 1 KiB", RequestCode.SEND_MESSAGE_V2, SEND, b"x" * 1_024, count)
    time_frames("pull", RequestCode.PULL_MESSAGE, PULL, b"", count)


if __name__ == "__main__":
    run(main)
