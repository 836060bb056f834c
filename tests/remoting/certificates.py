"""Certificates for tests, created by the ``openssl`` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def has_openssl() -> bool:
    """Return True if the command exists."""
    return shutil.which("openssl") is not None


class Certificates:
    """A certificate authority and the certificates that it issued, as PEM files in a folder.

    Attributes:
        authority: Certificate of the authority.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.authority = folder / "authority.pem"
        self._authority_key = folder / "authority.key"
        self._openssl("req", "-x509", *_new_key(self._authority_key), "-subj", "/CN=authority", "-out", self.authority)

    def issue(self, name: str, *alternatives: str, password: str | None = None) -> tuple[Path, Path]:
        """Return a new certificate and its key; *alternatives* as ``DNS:localhost`` or ``IP:127.0.0.1``."""
        folder = self._folder
        cert, key, request = (folder / f"{name}.{ending}" for ending in ("pem", "key", "csr"))
        self._openssl("req", *_new_key(key, password), "-subj", f"/CN={name}", "-out", request)
        extensions = folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(alternatives)}\n" if alternatives else "")
        issuer = ("-CA", self.authority, "-CAkey", self._authority_key, "-CAcreateserial")
        self._openssl("x509", "-req", "-in", request, *issuer, "-days", "9000", "-extfile", extensions, "-out", cert)
        return cert, key

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def _new_key(path: Path, password: str | None = None) -> tuple[str | Path, ...]:
    secrecy = ("-nodes",) if password is None else ("-passout", f"pass:{password}")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    return (*curve, "-days", "9000", "-keyout", path, *secrecy)
