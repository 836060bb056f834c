"""Signatures: who holds the secret key of an access key shows it, without sending it.

What is signed is the values of all ext fields in the order of their names, then the body as it travels (so compress
first, and add no field afterwards). Answers are not signed, and of a request neither code nor opaque. ACL 1.0 and 2.0
are alike in this.

Source: RocketMQ ``acl: AclClientRPCHook``, ``AclUtils``, ``AclSigner``; ``auth: DefaultAuthenticationContextBuilder``.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping

from mqtemplate.remoting.protocol.codes import Version
from mqtemplate.remoting.protocol.command import RemotingCommand

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
SECURITY_TOKEN = "SecurityToken"
_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


def signed_content(ext_fields: Mapping[str, str], body: bytes, *without: str) -> bytes:
    """What a signature is made over; *without* names fields that are left out beside the signature."""
    left_out = {SIGNATURE, *without}
    values = [ext_fields[name] for name in sorted(ext_fields) if name not in left_out]
    return "".join(values).encode() + body


def sign(content: bytes, secret_key: str) -> str:
    """HMAC-SHA1 in Base64."""
    return base64.b64encode(hmac.digest(secret_key.encode(), content, "sha1")).decode()


def sign_command(command: RemotingCommand, access_key: str, secret_key: str, security_token: str | None = None) -> None:
    """Add the key and the signature to a request, as the last thing before it is encoded."""
    ext_fields = command.ext_fields
    ext_fields[ACCESS_KEY] = access_key
    if security_token is not None:
        ext_fields[SECURITY_TOKEN] = security_token
    ext_fields[SIGNATURE] = sign(signed_content(ext_fields, command.body), secret_key)


def is_signed_with(command: RemotingCommand, secret_key: str) -> bool:
    """Whether a request was signed with that key; compared in the same time wherever the difference is."""
    without = (_UNIQUE_KEY_QUERY,) if command.version <= Version.V4_9_3 else ()
    expected = sign(signed_content(command.ext_fields, command.body, *without), secret_key)
    return hmac.compare_digest(expected.encode(), command.ext_fields.get(SIGNATURE, "").encode())
