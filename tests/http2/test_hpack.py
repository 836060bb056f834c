"""Header blocks, by the examples of RFC 7541, appendix C, and by random fields and bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.http2.hpack import (
    HeaderBombError,
    HeaderField,
    HeaderListTooLargeError,
    HpackDecoder,
    HpackEncoder,
    HpackError,
    huffman_decode,
    huffman_encode,
    is_valid_field,
)

LARGE = 1 << 20

FIRST = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
REQUESTS = [
    FIRST,
    [*FIRST, ("cache-control", "no-cache")],
    [
        (":method", "GET"),
        (":scheme", "https"),
        (":path", "/index.html"),
        (":authority", "www.example.com"),
        ("custom-key", "custom-value"),
    ],
]
PLAIN_REQUESTS = [
    "8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
    "8286 84be 5808 6e6f 2d63 6163 6865",
    "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
]
HUFFMAN_REQUESTS = [
    "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
    "8286 84be 5886 a8eb 1064 9cbf",
    "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
]
PLACE = ("location", "https://www.example.com")
RESPONSES = [
    [(":status", "302"), ("cache-control", "private"), ("date", "Mon, 21 Oct 2013 20:13:21 GMT"), PLACE],
    [(":status", "307"), ("cache-control", "private"), ("date", "Mon, 21 Oct 2013 20:13:21 GMT"), PLACE],
    [
        (":status", "200"),
        ("cache-control", "private"),
        ("date", "Mon, 21 Oct 2013 20:13:22 GMT"),
        PLACE,
        ("content-encoding", "gzip"),
        ("set-cookie", "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"),
    ],
]
PLAIN_RESPONSES = [
    (
        "4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32"
        "3120 474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 6c65 2e63 6f6d"
    ),
    "4803 3330 37c1 c0bf",
    (
        "88c1 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3220 474d 54c0 5a04 677a 6970"
        "7738 666f 6f3d 4153 444a 4b48 514b 425a 584f 5157 454f 5049 5541 5851 5745 4f49 553b 206d 6178 2d61"
        "6765 3d33 3630 303b 2076 6572 7369 6f6e 3d31"
    ),
]
HUFFMAN_RESPONSES = [
    (
        "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad"
        "1718 63c7 8f0b 97c8 e9ae 82ae 43d3"
    ),
    "4883 640e ffc1 c0bf",
    (
        "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 821d d7f2"
        "e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07"
    ),
]

LATIN = st.text(st.characters(max_codepoint=0xFF), max_size=40)
FIELDS = st.lists(st.tuples(st.sampled_from([":path", "x-mq-client-id", "date"]) | LATIN, LATIN), max_size=12)


def decoder(**options: int) -> HpackDecoder:
    return HpackDecoder(LARGE, **options)


def block(text: str) -> bytes:
    return bytes.fromhex(text)


# --- decoder --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coded", "field"),
    [
        ("400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572", ("custom-key", "custom-header")),
        ("040c 2f73 616d 706c 652f 7061 7468", (":path", "/sample/path")),
        ("1008 7061 7373 776f 7264 0673 6563 7265 74", ("password", "secret")),
        ("82", (":method", "GET")),
    ],
    ids=["with indexing", "without indexing", "never indexed", "indexed"],
)
def test_a_field_has_four_representations(coded: str, field: HeaderField) -> None:
    """RFC 7541, C.2."""
    assert decoder().decode(block(coded)) == [field]


@pytest.mark.parametrize("blocks", [PLAIN_REQUESTS, HUFFMAN_REQUESTS], ids=["plain", "Huffman"])
def test_a_later_request_refers_to_fields_of_the_one_before(blocks: list[str]) -> None:
    """RFC 7541, C.3 and C.4."""
    decoding = decoder()

    assert [decoding.decode(block(each)) for each in blocks] == REQUESTS


@pytest.mark.parametrize("blocks", [PLAIN_RESPONSES, HUFFMAN_RESPONSES], ids=["plain", "Huffman"])
def test_the_oldest_fields_leave_a_full_table(blocks: list[str]) -> None:
    """RFC 7541, C.5 and C.6: a table of 256 bytes."""
    decoding = decoder(table_bytes=256)

    assert [decoding.decode(block(each)) for each in blocks] == RESPONSES


def test_a_repeated_block_means_something_else_after_the_table_has_changed() -> None:
    """The cache of blocks never returns fields of an older table."""
    decoding = decoder()
    decoding.decode(block("4001 6101 31"))
    newest = block("be")

    assert [decoding.decode(newest), decoding.decode(newest)] == [[("a", "1")], [("a", "1")]]
    decoding.decode(block("4001 6201 32"))
    assert decoding.decode(newest) == [("b", "2")]
    decoding.decode(block("20"))
    with pytest.raises(HpackError, match="refers to a missing entry"):
        decoding.decode(newest)


def test_a_field_larger_than_the_table_empties_it() -> None:
    """RFC 7541, 4.4: that is no error."""
    decoding = decoder(table_bytes=64)
    decoding.decode(block("4001 6101 31"))

    assert decoding.decode(block("4001 62 28") + b"x" * 40) == [("b", "x" * 40)]
    with pytest.raises(HpackError, match="refers to a missing entry"):
        decoding.decode(block("be"))


def test_a_size_update_evicts_and_a_second_one_makes_room_again() -> None:
    """RFC 7541, 4.2: both stand at the start of one block."""
    decoding = decoder()
    decoding.decode(block("4001 6101 31"))

    assert decoding.decode(block("20 3fe11f 4001 6201 32 be")) == [("b", "2"), ("b", "2")]
    with pytest.raises(HpackError, match="refers to a missing entry"):
        decoding.decode(block("bf"))


@pytest.mark.parametrize(
    ("coded", "reason"),
    [
        ("80", "refers to entry 0"),
        ("be", "refers to a missing entry"),
        ("7e 0131", "refers to a missing entry"),
        ("ff 80 80 80 80 80 01", "an integer that is too large"),
        ("ff ff ff ff ff 7f", "an integer that is too large"),
        ("ff 80", "ends inside a field"),
        ("40", "ends inside a field"),
        ("40 0361", "ends inside a string"),
        ("40 0161 ff 80 80 80 80 08", "an integer that is too large"),
        ("82 20", "changes the size of the table after its first field"),
        ("3fe2 1f", "a dynamic table of 4097 bytes, allowed are 4096"),
        ("40 0161 81 00", "the padding of a Huffman-coded string must be up to 7 bits"),
        ("40 0161 82 1fff", "the padding of a Huffman-coded string must be up to 7 bits"),
        ("40 0161 84 ffff ffff", "contains the end-of-string symbol"),
    ],
)
def test_an_invalid_block_is_refused(coded: str, reason: str) -> None:
    with pytest.raises(HpackError, match=reason):
        decoder().decode(block(coded))


def test_a_list_above_the_limit_is_refused_and_the_next_block_decoded() -> None:
    """A few bytes may refer to many large entries. The table is kept up to date all the same."""
    decoding = HpackDecoder(10_000)
    decoding.decode(block("4001 61 7f 8118") + b"x" * 3_200)

    with pytest.raises(HeaderListTooLargeError, match="a header list of 64694 bytes, allowed are 10000"):
        decoding.decode(b"\xbe" * 20 + block("4001 6201 32"))
    assert decoding.decode(block("be")) == [("b", "2")]


def test_a_list_many_times_above_the_limit_is_not_decoded_to_its_end() -> None:
    """A block of 16 KiB may refer to 16,000 large entries: that would take milliseconds for each."""
    decoding = HpackDecoder(10_000)
    decoding.decode(block("4001 61 7f 8118") + b"x" * 3_200)

    with pytest.raises(HeaderBombError, match="a header list of more than 80825 bytes, allowed are 10000"):
        decoding.decode(b"\xbe" * 16_000)


@pytest.mark.parametrize(
    ("name", "value", "is_valid"),
    [
        ("x-mq-client-id", "a b", True),
        (":path", "/x", True),
        ("Host", "a", False),
        ("", "a", False),
        ("a b", "a", False),
        ("a:b", "a", False),
        ("a", "", True),
        ("a", "é\x7f", True),
        ("a", "line\r", False),
        ("a", "line\n", False),
        ("a", "\0", False),
        ("a", " a\t", True),
    ],
)
def test_a_field_that_http2_forbids_makes_the_connection_suspect(name: str, value: str, is_valid: bool) -> None:
    """RFC 9113, 8.2.1. The block itself is valid, so only the request is refused, and the table stays in order."""
    decoding = decoder()

    fields = decoding.decode(HpackEncoder().encode(((name, value),)))

    assert fields == [(name, value)]
    assert is_valid_field(name, value) is is_valid
    assert decoding.is_suspect is not is_valid


@given(data=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        fields = decoder().decode(data)
    except HpackError:
        return
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in fields)


# --- encoder --------------------------------------------------------------------------------------


@given(lists=st.lists(st.tuples(FIELDS, st.booleans()), max_size=8), limits=st.lists(st.integers(0, 5_000), max_size=8))
def test_fields_survive_a_connection(lists: list[tuple[list[HeaderField], bool]], limits: list[int]) -> None:
    """Each block is encoded twice, so that the second one may come from the cache, and the table changes its size."""
    encoder, decoding = HpackEncoder(), decoder()
    for number, (fields, is_frequent) in enumerate(lists):
        if number < len(limits):
            encoder.set_limit(limits[number])
        for _ in range(2):
            assert decoding.decode(encoder.encode(tuple(fields), is_frequent=is_frequent)) == fields


def test_a_frequent_list_becomes_a_few_bytes() -> None:
    encoder, decoding = HpackEncoder(), decoder()
    head = ((":status", "200"), ("content-type", "application/grpc"))
    trailers = (("grpc-status", "0"),)
    for fields in (head, trailers):
        decoding.decode(encoder.encode(fields, is_frequent=True))

    assert len(encoder.encode(head, is_frequent=True)) == 2
    assert len(encoder.encode(trailers, is_frequent=True)) == 1
    assert decoding.decode(encoder.encode(head, is_frequent=True)) == list(head)


def test_a_peer_without_a_table_gets_literals() -> None:
    encoder, decoding = HpackEncoder(), decoder(table_bytes=0)
    encoder.set_limit(0)
    fields = (("grpc-status", "0"),)

    assert [decoding.decode(encoder.encode(fields, is_frequent=True)) for _ in range(3)] == [[*fields]] * 3


@given(text=LATIN)
def test_huffman_codes_survive(text: str) -> None:
    assert huffman_decode(huffman_encode(text)) == text


def test_a_huffman_code_is_that_of_the_rfc() -> None:
    assert huffman_encode("www.example.com") == block("f1e3 c2e5 f23a 6ba0 ab90 f4ff")


@pytest.mark.parametrize("length", [64, 65])
def test_a_long_text_is_sent_without_huffman_code(length: int) -> None:
    """Details of errors are long, and each is another one: the code would take longer than the bytes that it saves."""
    field = ("grpc-message", "e" * length)

    encoded = HpackEncoder().encode((field,))

    assert (len(encoded) > length) is (length > 64)
    assert HpackDecoder(1 << 20).decode(encoded) == [field]
