"""HPACK, the compression of header blocks in HTTP/2. Source: RFC 7541.

Both sides of a connection keep the same dynamic table of header fields for each direction. A block refers to entries of
it, and adds new ones, so blocks must be decoded in the order in which they arrive, also those of refused requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mqtemplate.errors import RemoteProtocolError

HeaderField = tuple[str, str]
"""Name and value. Each character is one byte on the wire."""

# --- Huffman code: RFC 7541, appendix B -----------------------------------------------------------


_CODE_LENGTHS = bytes.fromhex(
    """
    0d 17 1c 1c 1c 1c 1c 1c 1c 18 1e 1c 1c 1e 1c 1c 1c 1c 1c 1c 1c 1c 1e 1c 1c 1c 1c 1c 1c 1c 1c 1c
    06 0a 0a 0c 0d 06 08 0b 0a 0a 08 0b 08 06 06 06 05 05 05 06 06 06 06 06 06 06 07 08 0f 06 0c 0a
    0d 06 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 08 07 08 0d 13 0d 0e 06
    0f 05 06 05 06 05 06 06 06 05 07 07 06 06 06 05 06 07 06 05 05 06 07 07 07 07 07 0f 0b 0e 0d 1c
    14 16 14 14 16 16 16 17 16 17 17 17 17 17 18 17 18 18 16 17 18 17 17 17 17 15 16 17 16 17 17 18
    16 15 14 16 16 17 17 15 17 16 16 18 15 16 17 17 15 15 16 15 17 16 17 17 14 16 16 16 17 16 16 17
    1a 1a 14 13 16 17 16 19 1a 1a 1a 1b 1b 1a 18 19 13 15 1a 1b 1b 1a 1b 18 15 15 1a 1a 1c 1b 1b 1b
    14 18 14 15 16 15 15 17 16 16 19 19 18 18 1a 17 1a 1b 1a 1a 1b 1b 1b 1b 1b 1c 1b 1b 1b 1b 1b 1a
    1e
    """
)
"""Number of bits of the code of each byte, and of the end of the string. The code is canonical: this defines it."""
_END_OF_STRING = 256
_MAX_PADDING_BITS = 7


def _canonical_codes(lengths: Sequence[int]) -> list[int]:
    """Return the code of each symbol: codes of one length count up with the symbols, and short ones come first."""
    codes = [0] * len(lengths)
    code = 0
    previous = 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - previous
        previous = lengths[symbol]
        codes[symbol] = code
        code += 1
    return codes


_CODES = _canonical_codes(_CODE_LENGTHS)


class _CodeNode:
    """Inner node of the tree of codes; a leaf is the number of its symbol."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: list[_CodeNode | int | None] = [None, None]


class _HuffmanState(dict[int, tuple["_HuffmanState", str]]):
    """State of a Huffman decoder between two bytes: byte -> next state and decoded characters.

    Transitions are computed when they are used first: few of the 65,536 occur in practice.

    Attributes:
        may_end: True if a string may end in this state: the bits since the last symbol are padding.
    """

    __slots__ = ("_node", "may_end")

    def __init__(self, node: _CodeNode, *, may_end: bool) -> None:
        super().__init__()
        self._node = node
        self.may_end = may_end

    def __missing__(self, byte: int) -> tuple[_HuffmanState, str]:
        node = self._node
        text = ""
        for bit in range(7, -1, -1):
            child = node.children[byte >> bit & 1]
            if child == _END_OF_STRING:
                raise HpackError("a Huffman-coded string contains the end-of-string symbol")
            if isinstance(child, int):
                text += chr(child)
                child = _TREE
            assert child is not None, "each inner node has two children"
            node = child
        found = self[byte] = _STATES[node], text
        return found


def _tree() -> _CodeNode:
    root = _CodeNode()
    for symbol, (code, length) in enumerate(zip(_CODES, _CODE_LENGTHS, strict=True)):
        node = root
        for bit in range(length - 1, 0, -1):
            side = code >> bit & 1
            child = node.children[side]
            if not isinstance(child, _CodeNode):
                child = node.children[side] = _CodeNode()
            node = child
        node.children[code & 1] = symbol
    return root


def _states(root: _CodeNode) -> dict[_CodeNode, _HuffmanState]:
    """Return the state of each inner node. Padding is the start of the end-of-string code: up to 7 bits that are 1."""
    states = {}
    waiting: list[tuple[_CodeNode, int | None]] = [(root, 0)]
    while waiting:
        node, ones = waiting.pop()
        states[node] = _HuffmanState(node, may_end=ones is not None and ones <= _MAX_PADDING_BITS)
        zero, one = node.children
        if isinstance(zero, _CodeNode):
            waiting.append((zero, None))
        if isinstance(one, _CodeNode):
            waiting.append((one, None if ones is None else ones + 1))
    return states


_TREE = _tree()
_STATES = _states(_TREE)
_START = _STATES[_TREE]


def huffman_decode(data: bytes) -> str:
    """Return the string that *data* encodes.

    Raises:
        HpackError: It contains the end-of-string symbol, or its padding is not the start of that symbol.
    """
    state = _START
    parts = []
    for byte in data:
        state, text = state[byte]
        parts.append(text)
    if not state.may_end:
        raise HpackError("the padding of a Huffman-coded string must be up to 7 bits, all of them 1")
    return "".join(parts)


def huffman_encode(text: str) -> bytes:
    """Return the Huffman code of a string of characters up to U+00FF."""
    bits = length = 0
    for byte in text.encode("latin-1"):
        bits = bits << _CODE_LENGTHS[byte] | _CODES[byte]
        length += _CODE_LENGTHS[byte]
    padding = -length % 8
    return (bits << padding | (1 << padding) - 1).to_bytes((length + padding) // 8, "big")


# --- tables: RFC 7541, 2.3 and appendix A ---------------------------------------------------------


DEFAULT_TABLE_BYTES = 4_096
"""Size of the dynamic table until a setting of the peer changes it."""
FIELD_OVERHEAD = 32
"""Bytes that a field counts in a table and in a list, in addition to its name and value. RFC 7541, 4.1."""

_NAMES_WITHOUT_VALUE = """
    accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control
    content-disposition content-encoding content-language content-length content-location content-range content-type
    cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since
    last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh
    retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""
_STATIC_TABLE: tuple[HeaderField, ...] = (
    ("", ""),  # index 0 is an error
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    *((":status", status) for status in ("200", "204", "206", "304", "400", "404", "500")),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    *((name, "") for name in _NAMES_WITHOUT_VALUE.split()),
)
_LAST_STATIC = 61
assert len(_STATIC_TABLE) == _LAST_STATIC + 1

_STATIC_SIZES = [len(name) + len(value) + FIELD_OVERHEAD for name, value in _STATIC_TABLE]
_STATIC_NAMES = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC_TABLE))) if index}
_STATIC_FIELDS = {field: index for index, field in enumerate(_STATIC_TABLE) if index}

_MAX_INTEGER = (1 << 28) - 1
_MAX_RESIZES = 2
"""Between two blocks an encoder needs no more: the smallest size, and the last one. RFC 7541, 4.2."""
# Small caches: each connection has its own.
_BOMB_FACTOR = 8
_MAX_CACHED_BLOCKS = 32
_MAX_CACHED_BYTES = 512
_MAX_CACHED_NAMES = 128
_MAX_CACHED_NAME_BYTES = 64

_VALID_NAME = re.compile(r":?[!#$%&'*+\-.^_`|~0-9a-z]+")
"""RFC 9113, 8.2.1: a token in lower case; the colon of a pseudo-header field is checked by the connection."""
_INVALID_VALUE = re.compile(r"[\0\r\n]")
"""RFC 9113 forbids spaces at the ends, too, but clients of gRPC send them (grpc/grpc, doc/PROTOCOL-HTTP2.md)."""


class HpackError(RemoteProtocolError):
    """A header block cannot be decoded. Nothing after it can be, so the connection must be closed."""


class HeaderListTooLargeError(RemoteProtocolError):
    """The fields of a block are larger than the limit. The block was decoded: those after it can be, too."""


class HeaderBombError(RemoteProtocolError):
    """The fields of a block are many times larger than the limit. The rest of it is not decoded: close the connection.

    A block of 16 KiB may refer to 16,000 fields of 4 KiB, which takes milliseconds to decode.
    """


def is_valid_field(name: str, value: str) -> bool:
    """Return True if HTTP/2 allows the field, or gRPC does. RFC 9113, 8.2.1."""
    return _VALID_NAME.fullmatch(name) is not None and _INVALID_VALUE.search(value) is None


# --- decoder --------------------------------------------------------------------------------------


class HpackDecoder:
    """Decoder of the header blocks of one connection. Not thread-safe.

    - The dynamic table has at most *table_bytes*, the setting that this side sent.
    - A block that does not change the table is cached: clients repeat the same block for each call. The cache is
      dropped when the table changes.
    - Each decoder has caches of its own, so that a peer cannot replace what another one uses.

    Args:
        max_list_bytes: Largest sum of the sizes of a block's fields; see `FIELD_OVERHEAD`.

    Attributes:
        is_suspect: True after a field that HTTP/2 forbids: each field must be checked by `is_valid_field` from then
            on, since a later block may refer to it.
    """

    def __init__(self, max_list_bytes: int, table_bytes: int = DEFAULT_TABLE_BYTES) -> None:
        self.is_suspect = False
        self._max_list_bytes = max_list_bytes
        self._limit = table_bytes
        self._table_bytes = table_bytes
        self._fields: list[HeaderField] = []  # the newest last
        self._sizes: list[int] = []
        self._size = 0
        self._blocks: dict[bytes, list[HeaderField]] = {}
        self._names: dict[bytes, str] = {}

    def decode(self, block: bytes) -> list[HeaderField]:
        """Return the fields of a block. The caller must not change the list: it may be returned again.

        Raises:
            HpackError: The block is invalid.
            HeaderListTooLargeError: Its fields are larger than the limit.
            HeaderBombError: They are so by `_BOMB_FACTOR`.
        """
        fields = self._blocks.get(block)
        if fields is None:
            try:
                fields = self._decode(block)
            except IndexError:
                raise HpackError("a header block ends inside a field, or refers to a missing entry") from None
        return fields

    def _decode(self, block: bytes) -> list[HeaderField]:
        fields: list[HeaderField] = []
        at = total = resizes = 0
        end = len(block)
        dynamic, sizes, limit = self._fields, self._sizes, self._max_list_bytes
        is_static = True  # True while the block does not change the table
        while at < end:
            byte = block[at]
            at += 1
            if byte & 0x80:
                index = byte & 0x7F
                if index == 0x7F:
                    index, at = _integer(block, at, 0x7F)
                if index > _LAST_STATIC:
                    field = dynamic[_LAST_STATIC - index]
                    total += sizes[_LAST_STATIC - index]
                elif index:
                    field = _STATIC_TABLE[index]
                    total += _STATIC_SIZES[index]
                else:
                    raise HpackError("a header block refers to entry 0")
            elif byte & 0x60 == 0x20:
                if fields:
                    raise HpackError("a header block changes the size of the table after its first field")
                size, at = _integer(block, at, 0x1F) if byte & 0x1F == 0x1F else (byte & 0x1F, at)
                resizes += 1
                if resizes > _MAX_RESIZES:
                    raise HpackError(f"a header block changes the size of the table more than {_MAX_RESIZES} times")
                self._resize(size)
                is_static = False
                continue
            else:
                field, size, at = self._literal(block, byte, at)
                total += size
                if byte & 0x40:
                    self._add(field, size)
                    is_static = False
            if total <= limit:
                fields.append(field)
            elif total > limit * _BOMB_FACTOR:
                raise HeaderBombError(f"a header list of more than {total} bytes, allowed are {limit}")
        if total > limit:
            raise HeaderListTooLargeError(f"a header list of {total} bytes, allowed are {limit}")
        if is_static and end <= _MAX_CACHED_BYTES:
            if len(self._blocks) >= _MAX_CACHED_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = fields
        return fields

    def _literal(self, block: bytes, byte: int, at: int) -> tuple[HeaderField, int, int]:
        """Return a field with a literal value, its size, and the position after it."""
        mask = 0x3F if byte & 0x40 else 0x0F
        index = byte & mask
        if index == mask:
            if block[at] < 0x80:  # as in most blocks: the name of an entry that is not one of the newest
                index, at = mask + block[at], at + 1
            else:
                index, at = _integer(block, at, mask)
        if index > _LAST_STATIC:
            name = self._fields[_LAST_STATIC - index][0]
        elif index:
            name = _STATIC_TABLE[index][0]
        else:
            name, at = self._name(block, at)
        length = block[at]
        if length < 0x7F and at + length < len(block):  # a short one without Huffman code
            value = block[at + 1 : at + 1 + length].decode("latin-1")
            at += 1 + length
        else:
            value, at = _string(block, at)
        if not value.isprintable():  # almost each value is, and the check of the others is slower
            self.is_suspect |= _INVALID_VALUE.search(value) is not None
        return (name, value), len(name) + len(value) + FIELD_OVERHEAD, at

    def _name(self, block: bytes, at: int) -> tuple[str, int]:
        start = at
        length = block[at] & 0x7F
        at += 1
        if length == 0x7F:
            length, at = _integer(block, at, 0x7F)
        at += length
        coded = block[start:at]
        name = self._names.get(coded)
        if name is None:
            name, at = _string(block, start)
            self.is_suspect |= _VALID_NAME.fullmatch(name) is None
            if len(self._names) >= _MAX_CACHED_NAMES:
                self._names.clear()
            if len(coded) <= _MAX_CACHED_NAME_BYTES:
                self._names[coded] = name
        return name, at

    def _add(self, field: HeaderField, size: int) -> None:
        self._blocks.clear()
        self._size += size
        self._fields.append(field)
        self._sizes.append(size)
        if self._size > self._table_bytes:
            self._evict()

    def _resize(self, size: int) -> None:
        if size > self._limit:
            raise HpackError(f"a dynamic table of {size} bytes, allowed are {self._limit}")
        self._table_bytes = size
        self._blocks.clear()
        self._evict()

    def _evict(self) -> None:
        """Remove the oldest fields until the others fit. A field larger than the table empties it. RFC 7541, 4.4."""
        count = 0
        while self._size > self._table_bytes:
            self._size -= self._sizes[count]
            count += 1
        del self._fields[:count], self._sizes[:count]


def _integer(block: bytes, at: int, prefix: int) -> tuple[int, int]:
    """Return an integer whose prefix has all bits set, and the position after it. RFC 7541, 5.1."""
    value, shift = prefix, 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if value > _MAX_INTEGER or shift > 28:
            raise HpackError("a header block contains an integer that is too large")
        if byte < 0x80:
            return value, at
        shift += 7


def _string(block: bytes, at: int) -> tuple[str, int]:
    """Return a string, and the position after it. RFC 7541, 5.2."""
    first = block[at]
    length = first & 0x7F
    at += 1
    if length == 0x7F:
        length, at = _integer(block, at, 0x7F)
    data = block[at : at + length]
    if len(data) < length:
        raise HpackError("a header block ends inside a string")
    return huffman_decode(data) if first & 0x80 else data.decode("latin-1"), at + length


# --- encoder --------------------------------------------------------------------------------------


_MAX_HUFFMAN = 64
"""Longest text that is sent in Huffman code. Longer ones are details of errors, each another one: the code would save
a fifth of their bytes, and take most of the time of a refused call."""


class HpackEncoder:
    """Encoder of the header blocks of one connection. Not thread-safe.

    A server sends few different lists of fields, so each encoded block is cached. Fields that are marked for it go into
    the dynamic table while there is room. No entry is ever evicted to make room, so the indexes change seldom.
    """

    _MAX_BLOCKS = 64

    def __init__(self) -> None:
        self._limit = DEFAULT_TABLE_BYTES
        self._size = 0
        self._resize_to: int | None = None
        self._table: dict[HeaderField, int] = {}  # field -> number of the entries that were added before it
        self._blocks: dict[tuple[HeaderField, ...], bytes] = {}

    def set_limit(self, table_bytes: int) -> None:
        """Use at most *table_bytes* for the dynamic table from the next block on: the peer's setting."""
        limit = min(table_bytes, DEFAULT_TABLE_BYTES)
        if limit != self._limit:
            self._limit = limit
            # The table is emptied first, and has the new size then. RFC 7541, 4.2 allows two updates.
            self._resize_to = limit
            self._table.clear()
            self._blocks.clear()
            self._size = 0

    def encode(self, fields: tuple[HeaderField, ...], *, is_frequent: bool = False) -> bytes:
        """Return the block of *fields*, which the peer has to decode next.

        Args:
            is_frequent: The same fields follow in many blocks: add them to the dynamic table, and cache the block.
        """
        block = self._blocks.get(fields)
        if block is not None:
            return block
        added = len(self._table)
        encoded = bytearray()
        if self._resize_to is not None:
            encoded += _coded_integer(0, 0x1F, 0x20) + _coded_integer(self._resize_to, 0x1F, 0x20)
        for name, value in fields:
            encoded += self._field(name, value, is_frequent=is_frequent)
        block = bytes(encoded)
        if len(self._table) > added:
            self._blocks.clear()  # the indexes of the other entries have changed
        elif is_frequent and self._resize_to is None and len(self._blocks) < self._MAX_BLOCKS:
            self._blocks[fields] = block
        self._resize_to = None
        return block

    def _field(self, name: str, value: str, *, is_frequent: bool) -> bytes:
        field = name, value
        index = _STATIC_FIELDS.get(field)
        if index is not None:
            return _coded_integer(index, 0x7F, 0x80)
        position = self._table.get(field)
        if position is not None:
            return _coded_integer(_LAST_STATIC + len(self._table) - position, 0x7F, 0x80)
        size = len(name) + len(value) + FIELD_OVERHEAD
        adds = is_frequent and self._size + size <= self._limit
        name_index = _STATIC_NAMES.get(name, 0)
        head = _coded_integer(name_index, 0x3F, 0x40) if adds else _coded_integer(name_index, 0x0F, 0x00)
        if adds:
            self._table[field] = len(self._table)
            self._size += size
        return head + (b"" if name_index else _coded_string(name)) + _coded_string(value)


def _coded_integer(value: int, prefix: int, pattern: int) -> bytes:
    if value < prefix:
        return bytes((pattern | value,))
    coded = bytearray((pattern | prefix,))
    value -= prefix
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    coded.append(value)
    return bytes(coded)


def _coded_string(text: str) -> bytes:
    huffman = huffman_encode(text) if len(text) <= _MAX_HUFFMAN else b""
    if 0 < len(huffman) < len(text):
        return _coded_integer(len(huffman), 0x7F, 0x80) + huffman
    return _coded_integer(len(text), 0x7F, 0x00) + text.encode("latin-1")
