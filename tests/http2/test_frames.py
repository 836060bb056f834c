"""Bytes of single frames."""

from __future__ import annotations

import pytest

from mqtemplate.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    ErrorCode,
    Http2Error,
    frame,
    goaway_frame,
    header_frames,
    parse_settings,
    rst_stream_frame,
    settings_frame,
    window_update_frame,
    without_padding,
)


@pytest.mark.parametrize(
    ("made", "coded"),
    [
        (frame(DATA, END_STREAM, 3, b"hello"), "000005 00 01 00000003 68656c6c6f"),
        (settings_frame({INITIAL_WINDOW_SIZE: 1 << 20}), "000006 04 00 00000000 0004 00100000"),
        (window_update_frame(1, 65_536), "000004 08 00 00000001 00010000"),
        (rst_stream_frame(5, ErrorCode.CANCEL), "000004 03 00 00000005 00000008"),
        (goaway_frame(7, ErrorCode.ENHANCE_YOUR_CALM, "slow"), "00000c 07 00 00000000 00000007 0000000b 736c6f77"),
    ],
)
def test_a_frame_has_the_bytes_of_the_rfc(made: bytes, coded: str) -> None:
    """RFC 9113, 4.1 and 6."""
    assert made == bytes.fromhex(coded)


def test_a_large_header_block_continues_in_further_frames() -> None:
    """RFC 9113, 6.10: the last one ends the block; the first one ends the stream."""
    block = bytes(range(25))

    made = header_frames(1, block, 10, ends_stream=True)

    heads = [HEAD.unpack_from(made, at) for at in (0, 19, 38)]
    assert heads == [(0, 10, HEADERS, END_STREAM, 1), (0, 10, CONTINUATION, 0, 1), (0, 5, CONTINUATION, END_HEADERS, 1)]
    assert made[HEAD_BYTES:19] + made[28:38] + made[47:] == block


def test_padding_is_removed() -> None:
    assert without_padding("DATA", PADDED, b"\x02ab\0\0", 1) == b"ab"
    assert without_padding("DATA", PADDED, b"\x00ab", 1) == b"ab"
    assert without_padding("DATA", 0, b"\x02ab\0\0", 1) == b"\x02ab\0\0"


@pytest.mark.parametrize(("payload", "code"), [(b"\x03ab", "PROTOCOL_ERROR"), (b"", "FRAME_SIZE_ERROR")])
def test_padding_that_is_longer_than_the_payload_is_refused(payload: bytes, code: str) -> None:
    with pytest.raises(Http2Error, match=code):
        without_padding("DATA", PADDED, payload, 1)


def test_settings_are_a_list_in_which_the_last_value_counts() -> None:
    """RFC 9113, 6.5.3; unknown settings are included, and ignored by the connection."""
    payload = bytes.fromhex("0004 00000001 00ff 00000009 0004 00000002")

    assert parse_settings(payload) == [(4, 1), (0xFF, 9), (4, 2)]


@pytest.mark.parametrize(
    ("coded", "text"),
    [
        ("0004 00000001 00", "SETTINGS with 7 bytes, which is no multiple of 6 (FRAME_SIZE_ERROR)"),
        ("0002 00000002", "setting 2 has the value 2, allowed are 0 to 1 (PROTOCOL_ERROR)"),
        ("0004 80000000", "setting 4 has the value 2147483648, allowed are 0 to 2147483647 (FLOW_CONTROL_ERROR)"),
        ("0005 00003fff", "setting 5 has the value 16383, allowed are 16384 to 16777215 (PROTOCOL_ERROR)"),
        ("0005 01000000", "setting 5 has the value 16777216, allowed are 16384 to 16777215 (PROTOCOL_ERROR)"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(coded: str, text: str) -> None:
    """RFC 9113, 6.5.2."""
    with pytest.raises(Http2Error) as refused:
        parse_settings(bytes.fromhex(coded))

    assert str(refused.value) == text
