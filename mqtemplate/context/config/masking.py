"""Removal of secrets from values that are shown: by the name of a key, and by the form of a value.

Every place that shows configuration uses `masked` or `masked_text`: commands, the actuator, the dashboard, errors,
AsyncAPI documents. It hides too much rather than too little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HIDDEN = "********"

_SECRET_PART = re.compile(
    r"password|passwd|passphrase|passwort|secret|token|credential|(access|api|private|signing|shared|account|master|auth"
    r"|encryption|storage)key|jaas|signature"
)
"""Parts of a name, without its separators, that make the value and everything below it secret."""
_SECRET_WORDS = frozenset({"pass", "pwd", "pw", "key", "auth", "authorization", "dsn", "sas", "sig", "cookie", "sasl"})
"""Last words of a name that make its value secret: ``db-pass`` and ``basic.auth``, but not ``auth-enabled``."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*")
_BEARER = re.compile(r"\b(bearer|basic)(\s+)(?=\S*[0-9A-Z=])[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
# A name starts where no other one could: each text is read once, however long it is.
_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://")
_END_OF_URL = re.compile(r"[\s\"'<>]|[,;|](?=\s{0,9}[A-Za-z][A-Za-z0-9+.-]{0,40}://)")
_QUERY = re.compile(r"\?(?=[^@]*(=|$))")
"""Start of a query: a question mark before an @ without a name between them is a part of a password."""
_ORACLE = re.compile(r"(jdbc:oracle:[a-z]+:)([^\s/@]+)/(\S+?)@(?=[^@\s]*(\s|$))", re.IGNORECASE)
_USER_AT_HOST = re.compile(r"(?<![\w.%+-])([\w.%+-]+):([^\s/:@;,\"']+)@(?=[\w\[])")
_PAIR = re.compile(r"(?<![\w.%$\[\]-])(?P<name>[\w.%$\[\]-]*[\w\]])(?P<between>[\"']?\s*(=>|:=|[=:])\s*)", re.ASCII)
_OPTION = re.compile(r"(?<!\S)--?(?P<name>[A-Za-z][\w.-]*)(?P<between>\s+)(?=[^\s=:-])", re.ASCII)
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"?|'(?:\\.|''|[^'\\])*'?|\{[^}]*\}?")
_ARGUMENT = re.compile(
    r"(?:\\.|([\"'])(?![\s,;}\])]|$)(?:\\.|(?!\1).)*(?:\1|$)|(?![}\])](?=[\s,;}\])]|$))[^\s;&\"'\\])*", re.DOTALL
)
"""An argument of a command line: it ends at a blank that is neither quoted nor escaped."""
_END_OF_VALUE = re.compile(r"[;&\n]|[\"'}\])](?=[\s,;}\])]|$)|(,\s{0,9}|\s{1,9})[\w.-]+\s{0,9}[=:](?!=*(\s|$))")


def is_secret_name(name: str, *, is_declared: bool = False) -> bool:
    """Return True if a key of this name has a secret value.

    Args:
        is_declared: The library declares the key with its type, so a last word such as ``auth`` says nothing.
    """
    # A property of the JVM is -Dname=value.
    words = [word.lower() for word in _WORD.findall(unquote(name).removeprefix("-D"))]
    if _SECRET_PART.search("".join(words)) is not None:
        return True
    return not is_declared and bool(words) and words[-1] in _SECRET_WORDS


def masked(value: Any, name: str = "") -> Any:
    """Return a value as JSON has it, without secrets.

    Args:
        name: Name of its key.
    """
    from pydantic import SecretBytes, SecretStr  # the help of the command line needs the texts only

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, SecretStr | SecretBytes) or is_secret_name(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): masked(each, str(key)) for key, each in value.items()}
    if isinstance(value, Enum):
        return masked(value.value)
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return [masked(each) for each in value]
    if isinstance(value, int | float):
        return value
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode("utf-8", "backslashreplace")
    return masked_text(value.as_posix() if isinstance(value, Path) else str(value))


def masked_text(text: str) -> str:
    """Return a text without the secrets that its form shows.

    Known are the user information of URLs, ``key=value`` pairs of connection strings, queries and options, tokens in
    the form of the header ``Authorization``, JSON Web Tokens, and private keys.
    """
    if not text or text == HIDDEN:
        return text
    text = _PEM.sub(HIDDEN, text)
    text = _JWT.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    text = _ORACLE.sub(rf"\1\2/{HIDDEN}@", text)
    text = _without_user_information(text)
    text = _USER_AT_HOST.sub(rf"\1:{HIDDEN}@", text)
    text = _without_secret_pairs(text, _OPTION)
    return _without_secret_pairs(text, _PAIR)


def _without_user_information(text: str) -> str:
    parts: list[str] = []
    end = 0
    starts = [(found.group(), found.start(), found.end()) for found in _SCHEME.finditer(text)]
    for index, (scheme, start, after) in enumerate(starts):
        if start < end:
            continue
        following = starts[index + 1][1] if index + 1 < len(starts) else len(text)
        stop = _END_OF_URL.search(text, after, following)
        url_end = stop.start() if stop else following
        rest = text[after:url_end]
        parts += [text[end:after], _hidden_user(scheme.lower(), rest)]
        end = url_end
    return "".join(parts) + text[end:]


def _hidden_user(scheme: str, rest: str) -> str:
    """Return what follows a scheme. A password may contain @, / and #, although a URL must encode them."""
    query = _QUERY.search(rest)
    before_query = rest if query is None else rest[: query.start()]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" not in authority:
        host, colon, port = authority.partition(":")
        may_be_user = colon and (not port.isdecimal() or scheme not in ("http://", "https://", "ws://", "wss://"))
        if not may_be_user or "@" not in before_query:
            return rest
    secret, _, host = before_query.rpartition("@")
    name, colon, _ = secret.partition(":")
    return f"{name + colon if colon else ''}{HIDDEN}@{host}{rest[len(before_query) :]}"


def _without_secret_pairs(text: str, pattern: re.Pattern[str]) -> str:
    parts: list[str] = []
    at = 0
    while found := pattern.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        if not is_secret_name(found["name"]) or text.startswith("//", at):
            continue
        is_option = found["between"] == "=" and found["name"].startswith("-")
        end = _end_of_value(text, at, is_argument=is_option or pattern is _OPTION)
        if end > at:
            quote = text[at] if text[at] in "\"'" else ""
            parts.append(f"{quote}{HIDDEN}{quote}")
        at = end
    return "".join(parts) + text[at:]


def _end_of_value(text: str, start: int, *, is_argument: bool) -> int:
    quoted = _QUOTED.match(text, start)
    if is_argument:
        argument = _ARGUMENT.match(text, start if quoted is None else quoted.end())
        assert argument is not None, "it may be empty"
        return argument.end()
    if quoted is not None:
        return quoted.end()
    found = _END_OF_VALUE.search(text, start)
    return len(text) if found is None else found.start()
