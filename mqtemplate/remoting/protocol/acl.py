"""ACL signatures: proof that a client has the secret key of an access key. The secret key is never sent.

Signed are the values of all ext fields, in the order of their names, and then the body as it is sent. So a body is
compressed first, and no field is added after signing. Code and opaque are not signed, and responses have no signature.
ACL 1.0 and 2.0 sign in the same way.

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


def signed_content(ext_fields: Mapping[str, str], body: bytes, *unsigned: str) -> bytes:
    """Return the bytes that are signed; *unsigned* names fields that are left out besides the signature itself."""
    values = [ext_fields[name] for name in sorted(ext_fields) if name != SIGNATURE and name not in unsigned]
    return "".join(values).encode() + body


def sign(content: bytes, secret_key: str) -> str:
    """Return the HMAC-SHA1 of *content* in Base64."""
    return base64.b64encode(hmac.digest(secret_key.encode(), content, "sha1")).decode()


def sign_command(command: RemotingCommand, access_key: str, secret_key: str, security_token: str | None = None) -> None:
    """Add the access key and the signature to a request. This must be the last change before it is encoded.

    Brokers of RocketMQ 4.9 verify queries of messages without one field, whatever the version of the client. Newer ones
    do so up to its version 4.9.3 (``acl: PlainAccessValidator``). So such a query has that version, and all verify it.
    """
    ext_fields = command.ext_fields
    ext_fields[ACCESS_KEY] = access_key
    if security_token is not None:
        ext_fields[SECURITY_TOKEN] = security_token
    if _UNIQUE_KEY_QUERY in ext_fields:
        command.version = min(command.version, int(Version.V4_9_3))
    ext_fields[SIGNATURE] = sign(signed_content(ext_fields, command.body, *_unsigned(command)), secret_key)


def _unsigned(command: RemotingCommand) -> tuple[str, ...]:
    """Return the field that clients up to 4.9.3 do not sign. RocketMQ: DefaultAuthenticationContextBuilder."""
    return (_UNIQUE_KEY_QUERY,) if command.version <= Version.V4_9_3 else ()


def is_signed_with(command: RemotingCommand, secret_key: str) -> bool:
    """Return True if a request was signed with that key. The time does not depend on where signatures differ."""
    expected = sign(signed_content(command.ext_fields, command.body, *_unsigned(command)), secret_key)
    return hmac.compare_digest(expected.encode(), command.ext_fields.get(SIGNATURE, "").encode())
