"""Headers that are read without decoding them, because one of the same form was decoded before.

The headers that a client sends with requests of one kind mostly differ in few values, such as queue ID and opaque. What
remains without these values is the *form* of a header. It determines all decisions about a request but those that
depend on the values; they are taken once for each form: it is decoded with other values in these places, which proves
that they are the values of these fields. A header with an unknown form, or with an unusual value, is decoded as any
other.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.json_header import decode_json_header

_MAX_FORMS = 1_000
_MAX_FORMS_PER_CONNECTION = 4
_MAX_ATTEMPTS = 16
_ATTEMPT_INTERVAL = 1_000
"""A client that sends another text in each request has a new form each time: most of these are not inspected."""

HeaderKey = tuple[bytes | str, ...]
"""The parts of a header, and between them the names of its values."""

FormT = TypeVar("FormT")


class HeaderValue(NamedTuple):
    """Value that differs between headers of one form.

    Attributes:
        before: Pattern of what is before it, as a regular expression that looks behind.
        pattern: Pattern of the value. A number has fewer digits than would fit into its field.
        after: Pattern of what is after it, as a regular expression that looks ahead.
        probe: Value with which a new form is decoded.
        is_optional: A form may be without it.
    """

    before: bytes
    pattern: bytes
    after: bytes
    probe: bytes
    is_optional: bool = False


OPAQUE = HeaderValue(rb'(?<="opaque":)', rb"[0-9]{1,9}", rb"(?=[,}])", b"234567891")


def field_value(name: str, pattern: bytes, probe: bytes) -> HeaderValue:
    """Return the value of a field that has *name* in JSON."""
    return HeaderValue(b'(?<="%b":")' % name.encode(), pattern, b'(?=")', probe)


class _KnownForm(NamedTuple, Generic[FormT]):
    """A form, and the pattern that matches its headers: the groups are the values in the order of their names."""

    form: FormT
    pattern: re.Pattern[bytes]
    groups: tuple[int, ...]


class HeaderForms(ABC, Generic[FormT]):
    """The known forms of one kind of request, of all connections. Above a limit of their number all are forgotten.

    Args:
        values: The values by their names, with one ``opaque``. None occurs twice in a header.
    """

    def __init__(self, values: Mapping[str, HeaderValue]) -> None:
        self._values = values
        self._required = {name for name, value in values.items() if not value.is_optional}
        named = [b"%b(?P<%b>%b)%b" % (each.before, name.encode(), *each[1:3]) for name, each in values.items()]
        self._find = re.compile(b"|".join(named))
        self._forms: dict[HeaderKey, _KnownForm[FormT] | None] = {}

    @abstractmethod
    def form_of(self, key: HeaderKey, request: RemotingCommand) -> FormT | None:
        """Return the form of requests like *request*, whose header has the probes; None to decode all of them.

        It compares the fields of the request with the probes of its values, except for the opaque.

        Raises:
            RemoteProtocolError: The header is invalid: decode all of them.
        """

    def find(self, header: bytes, seen: set[int]) -> _KnownForm[FormT] | None:
        """Return the form of *header*; None if it has to be decoded.

        Args:
            seen: Hashes of forms, to which an unknown form is added. It is decoded when it occurs the second time.
        """
        key = self._key_of(header)
        if key is None:
            return None
        if key not in self._forms:
            if hash(key) not in seen:
                seen.add(hash(key))
                return None
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = self._decode(key)
        return self._forms[key]

    def _key_of(self, header: bytes) -> HeaderKey | None:
        """Return the key of a header; None if a value is missing, unusual, or there twice."""
        parts: list[bytes | str] = []
        at = 0
        for found in self._find.finditer(header):
            assert found.lastgroup is not None
            parts += header[at : found.start()], found.lastgroup
            at = found.end()
        names = parts[1::2]
        if len(set(names)) < len(names) or not self._required.issubset(names):
            return None
        return (*parts, header[at:])

    def _decode(self, key: HeaderKey) -> _KnownForm[FormT] | None:
        """Decode a header with the probes. Return None if headers with this key are always decoded."""
        data = b"".join(self._values[part].probe if isinstance(part, str) else part for part in key)
        try:
            request = decode_json_header(data)
            if request.is_response or request.is_one_way or request.opaque != int(self._values["opaque"].probe):
                return None
            form = self.form_of(key, request)
        except RemoteProtocolError:
            return None
        if form is None:
            return None
        parts = [b"(%b)" % self._values[part].pattern if isinstance(part, str) else re.escape(part) for part in key]
        names = value_names(key)
        groups = tuple(1 + (names.index(name) if name in names else len(names)) for name in self._values)
        return _KnownForm(form, re.compile(b"".join(parts) + b"()"), groups)  # the last group is for missing values


class ConnectionForms(Generic[FormT]):
    """The forms of the headers that one connection sent last."""

    def __init__(self, forms: HeaderForms[FormT]) -> None:
        self._all = forms
        self._forms: list[_KnownForm[FormT]] = []
        self._seen: set[int] = set()
        self._misses = 0

    def match(self, header: bytes) -> tuple[FormT, tuple[bytes, ...]] | None:
        """Return the form of a header in JSON and its values; None if it has to be decoded.

        The values have the order of `HeaderForms`. One that the form does not have is empty.
        """
        for known in self._forms:
            found = known.pattern.fullmatch(header)
            if found is not None:
                if known is not self._forms[0]:
                    self._use(known)
                return known.form, found.group(*known.groups)
        return self._match_new(header)

    def _match_new(self, header: bytes) -> tuple[FormT, tuple[bytes, ...]] | None:
        self._misses += 1
        if self._misses > _MAX_ATTEMPTS and self._misses % _ATTEMPT_INTERVAL:
            return None
        known = self._all.find(header, self._seen)
        found = None if known is None else known.pattern.fullmatch(header)
        if known is None or found is None:
            return None
        self._misses = 0
        self._seen.clear()
        self._use(known)
        return known.form, found.group(*known.groups)

    def _use(self, known: _KnownForm[FormT]) -> None:
        """Try this form first."""
        self._forms = [known, *(other for other in self._forms if other is not known)][:_MAX_FORMS_PER_CONNECTION]


def value_names(key: HeaderKey) -> list[str]:
    """Return the names of the values in the order of the header."""
    return [part for part in key if isinstance(part, str)]
