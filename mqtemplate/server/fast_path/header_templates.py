"""Header templates: request headers that are read without decoding them. `mqtemplate.server.fast_path` draws one.

The headers that a client sends with requests of one kind mostly differ in few values, such as queue ID and opaque. The
text without these values is the *key* of a header. It determines all decisions about a request except the ones that
depend on the values. They are taken once for each key: a header with this key and with other values in the gaps, the
*probes*, is decoded. If its fields have the probes, the gaps are these fields, and the result is the *template* of all
headers with this key. A header with an unknown key, or with an unusual value, is decoded as any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.message import Property
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties_template import AddedProperties, PropertiesTemplate
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, SendMessageRequestHeaderV2
from mqtemplate.remoting.protocol.json_header import decode_json_header
from mqtemplate.remoting.protocol.messages import decode_properties_text
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_MAX_TEMPLATES_PER_CONNECTION = 4
"""Each is a pattern that is tried for each header. A client has one or two for each topic."""
_MAX_ATTEMPTS = 16
_ATTEMPT_INTERVAL = 1_000
"""A client that sends another text in each request has a new key each time: most of these are not inspected."""

HeaderKey = tuple[bytes | str, ...]
"""The parts of a header, and between them the names of its values."""

TemplateT = TypeVar("TemplateT")


class HeaderValue(NamedTuple):
    """Value that differs between headers of one template.

    Attributes:
        before: Pattern of the text before it, as a regular expression that looks behind.
        pattern: Pattern of the value. A number has fewer digits than would fit into its field.
        after: Pattern of the text after it, as a regular expression that looks ahead.
        probe: Value with which a new template is decoded.
        is_optional: A template may be without it.
    """

    before: bytes
    pattern: bytes
    after: bytes
    probe: bytes
    is_optional: bool = False


# The opaque is a member of the header, a number without quotes. It is the last member of some clients, so "}" ends it.
OPAQUE = HeaderValue(rb'(?<="opaque":)', rb"[0-9]{1,9}", rb"(?=[,}])", b"234567891")


def field_value(name: str, pattern: bytes, probe: bytes) -> HeaderValue:
    """Return the value of a field of ``extFields``, whose members are all strings in JSON."""
    return HeaderValue(b'(?<="%b":")' % name.encode(), pattern, b'(?=")', probe)


class _KnownTemplate(NamedTuple, Generic[TemplateT]):
    """A template, and the pattern that matches its headers: the groups are the values in the order of their names."""

    template: TemplateT
    pattern: re.Pattern[bytes]
    groups: tuple[int, ...]


class HeaderTemplates(Generic[TemplateT]):
    """The known templates of one kind of request, of all connections.

    Args:
        values: The values by their names, with one ``opaque``. None occurs twice in a header.
        template_of: Returns the template of requests like this one, whose header has this key and the probes; None to
            decode all of them. It compares the fields of the request with the probes of its values, except for the
            opaque. It raises `RemoteProtocolError` for an invalid header.
        max_templates: Above this number all are forgotten.
    """

    def __init__(
        self,
        values: Mapping[str, HeaderValue],
        template_of: Callable[[HeaderKey, RemotingCommand], TemplateT | None],
        *,
        max_templates: int = 1_000,
    ) -> None:
        self._values = values
        self._template_of = template_of
        self._max_templates = max_templates
        self._required = {name for name, value in values.items() if not value.is_optional}
        named = [b"%b(?P<%b>%b)%b" % (each.before, name.encode(), *each[1:3]) for name, each in values.items()]
        self._find = re.compile(b"|".join(named))
        self._templates: dict[HeaderKey, _KnownTemplate[TemplateT] | None] = {}

    def __len__(self) -> int:
        """Return the number of known keys, including the keys of headers that are always decoded."""
        return len(self._templates)

    def find(self, header: bytes, seen: set[int]) -> _KnownTemplate[TemplateT] | None:
        """Return the template of *header*; None if it has to be decoded.

        Args:
            seen: Hashes of keys, to which an unknown key is added. It is decoded when it occurs the second time: a text
                of its own in each header then costs no second decoding.
        """
        key = self._key_of(header)
        if key is None:
            return None
        if key not in self._templates:
            if hash(key) not in seen:
                seen.add(hash(key))
                return None
            if len(self._templates) >= self._max_templates:
                self._templates.clear()
            self._templates[key] = self._decode(key)
        return self._templates[key]

    def _key_of(self, header: bytes) -> HeaderKey | None:
        """Return the key of a header; None if a value is missing, unusual, or there twice.

        With a value twice, as in ``"e":"3","e":"1"``, it would depend on the JSON parser which of them counts.
        """
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

    def _decode(self, key: HeaderKey) -> _KnownTemplate[TemplateT] | None:
        """Decode a header with the probes. Return None if headers with this key are always decoded."""
        data = b"".join(self._values[part].probe if isinstance(part, str) else part for part in key)
        try:
            request = decode_json_header(data)
            # A gap may also be in a text that only looks like a field, such as a property with the value '","g":"12'.
            # Then the decoded field does not have the probe: here for the opaque, in `_template_of` for the others.
            if request.is_response or request.is_one_way or request.opaque != int(self._values["opaque"].probe):
                return None
            template = self._template_of(key, request)
        except RemoteProtocolError:
            return None
        if template is None:
            return None
        parts = [b"(%b)" % self._values[part].pattern if isinstance(part, str) else re.escape(part) for part in key]
        names = value_names(key)
        groups = tuple(1 + (names.index(name) if name in names else len(names)) for name in self._values)
        return _KnownTemplate(template, re.compile(b"".join(parts) + b"()"), groups)  # the last group: missing values


class ConnectionTemplates(Generic[TemplateT]):
    """The templates of the headers that one connection sent last."""

    def __init__(self, templates: HeaderTemplates[TemplateT]) -> None:
        self._all = templates
        self._last: list[_KnownTemplate[TemplateT]] = []
        self._seen: set[int] = set()
        self._misses = 0

    def match(self, header: bytes) -> tuple[TemplateT, tuple[bytes, ...]] | None:
        """Return the template of a header in JSON and its values; None if it has to be decoded.

        The values have the order of `HeaderTemplates`. A value that the template does not have is empty.
        """
        for known in self._last:
            found = known.pattern.fullmatch(header)
            if found is not None:
                if known is not self._last[0]:
                    self._use(known)
                return known.template, found.group(*known.groups)
        return self._match_new(header)

    def _match_new(self, header: bytes) -> tuple[TemplateT, tuple[bytes, ...]] | None:
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
        return known.template, found.group(*known.groups)

    def _use(self, known: _KnownTemplate[TemplateT]) -> None:
        """Try this template first."""
        self._last = [known, *(other for other in self._last if other is not known)][:_MAX_TEMPLATES_PER_CONNECTION]


def value_names(key: HeaderKey) -> list[str]:
    """Return the names of the values in the order of the header."""
    return [part for part in key if isinstance(part, str)]


# --- sends ------------------------------------------------------------------------------------------

_SEND_CODES = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)

_TEXT = rb"[ !#-\[\]-~]+"

# In JSON the separators 01 and 02 of properties are the texts \u0001 and \u0002. Ids and keys have bytes only that are
# equal in JSON and in a record, and that end no value. All probes differ, or exchanged fields would look right.
_SEND_VALUES = {
    "queue_id": field_value("e", rb"[0-9]{1,9}", b"123456789"),
    "born": field_value("g", rb"[0-9]{1,14}", b"987654321987"),
    "unique_id": HeaderValue(
        rb"(?<=UNIQ_KEY\\u0001)", rb"[0-9A-Za-z]+", rb'(?=\\u0002|")', b"0PROBE0ID0", is_optional=True
    ),
    "opaque": OPAQUE,
    "keys": HeaderValue(rb"(?<=KEYS\\u0001)", _TEXT, rb"(?=\\u0002)", b"1PROBE1KEYS1", is_optional=True),
    "sharding_key": HeaderValue(
        rb"(?<=__SHARDINGKEY\\u0001)", _TEXT, rb'(?=\\u0002|")', b"2PROBE2SHARD2", is_optional=True
    ),
}


@dataclass(frozen=True, slots=True)
class SendTemplate:
    """Common part of all sends of one template. Their messages are ordinary: without a delay, not in a transaction.

    The values are queue ID, time of birth, message id, opaque, keys and sharding key. Without keys, or without a
    sharding key, theirs is empty, and so is the message id for the batches of a producer that gives them none.

    Attributes:
        properties: Including the ones that the broker adds. None for batches: of their headers only topic, sys flag and
            reconsume times count, and the messages are in the body.
    """

    topic: str
    properties: PropertiesTemplate | None
    tags_code: int
    flag: int
    sys_flag: int
    reconsume_times: int


def send_templates(added: AddedProperties) -> HeaderTemplates[SendTemplate]:
    """Return the templates of sends. A message with another property in each send has a new key each time."""
    return HeaderTemplates(_SEND_VALUES, partial(_send_template, added))


def _send_template(added: AddedProperties, key: HeaderKey, request: RemotingCommand) -> SendTemplate | None:
    """Return the template; None if the message is not ordinary."""
    if request.code not in _SEND_CODES:
        return None
    sent = request.header(SendMessageRequestHeaderV2)
    if (sent.queue_id, sent.born_timestamp) != _probes(_SEND_VALUES, "queue_id", "born"):
        return None
    if sent.topic.startswith(RETRY_TOPIC_PREFIX):
        return None
    properties, tags_code = None, 0
    if sent.batch or request.code == RequestCode.SEND_BATCH_MESSAGE:
        # The response has the id of the whole batch. It may have no id, since brokers 4.x gave it to each message.
        probe = _SEND_VALUES["unique_id"].probe.decode() if "unique_id" in key else None
        if decode_properties_text(sent.properties).get(Property.UNIQ_KEY) != probe:
            return None
    else:
        complete = added.complete_text(sent.properties)
        if complete is None or complete.unique_id.encode() != _SEND_VALUES["unique_id"].probe:
            return None
        others = (_SEND_VALUES[name].probe if name in key else b"" for name in ("keys", "sharding_key"))
        properties = PropertiesTemplate.around(complete.encoded, _SEND_VALUES["unique_id"].probe, *others)
        tags_code = complete.tags_code
        if properties is None:
            return None
    times = max(sent.reconsume_times or 0, 0)
    return SendTemplate(sent.topic, properties, tags_code, sent.flag, sent.sys_flag & SysFlag.OF_CLIENTS, times)


# --- pulls ------------------------------------------------------------------------------------------

_PULL_CODES = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)

# A consumer's pulls of one topic differ in these. In its first pulls the sys flag says that there is no offset to
# commit: that is a second template.
_PULL_VALUES = {
    "queue_id": field_value("queueId", rb"[0-9]{1,9}", b"123456789"),
    "queue_offset": field_value("queueOffset", rb"[0-9]{1,18}", b"345678912345"),
    "commit_offset": field_value("commitOffset", rb"[0-9]{1,18}", b"987654321987"),
    "opaque": OPAQUE,
}


@dataclass(frozen=True, slots=True, eq=False)
class PullTemplate:
    """Common part of all pulls of one template. The values are queue ID, queue offset, offset to commit and opaque.

    Attributes:
        header: A header with the probes in the places of these values.
    """

    header: PullMessageRequestHeader


def pull_templates() -> HeaderTemplates[PullTemplate]:
    """Return the table of the templates of pulls."""
    return HeaderTemplates(_PULL_VALUES, _pull_template)


def _pull_template(key: HeaderKey, request: RemotingCommand) -> PullTemplate | None:
    if request.code not in _PULL_CODES:
        return None
    pull = request.header(PullMessageRequestHeader)
    probes = _probes(_PULL_VALUES, "queue_id", "queue_offset", "commit_offset")
    return PullTemplate(pull) if (pull.queue_id, pull.queue_offset, pull.commit_offset) == probes else None


def _probes(values: Mapping[str, HeaderValue], *names: str) -> tuple[int, ...]:
    return tuple(int(values[name].probe) for name in names)
