"""The place of a copy: a folder, or an object store. Names and bytes only; nothing here knows what the objects mean."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from mqtemplate.errors import ConfigurationError, CopyError
from mqtemplate.extras import install_command
from mqtemplate.processes import OPEN_FLAGS
from mqtemplate.store.files.disk import Disk

_REMOTE = {"s3": "Amazon S3 and what speaks its protocol", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
_PREFIXES = {"s3": "aws_", "gs": "google_", "az": "azure_"}
_FORMS = "file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
_TEMPORARY = ".tmp-"
_MAX_RETRIES = 2
_REQUEST_TIMEOUT = timedelta(seconds=30)


class ObjectStore(Protocol):
    """Objects by their names, such as ``epochs/00000001.json``. A name that was written is seen by each later call.

    Each method raises `CopyError` if the store fails or does not answer.

    Attributes:
        url: As the user gave it.
    """

    url: str

    def put(self, name: str, data: bytes) -> None:
        """Write an object, all of it or nothing. An older one is replaced."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one. Return False if another process was first: of several one wins."""

    def get(self, name: str) -> bytes:
        """Return the content of an object."""

    def list(self, prefix: str) -> dict[str, int]:
        """Return the names that begin with *prefix*, sorted, with their sizes. *prefix* ends with ``/`` or is empty."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. One that is missing is no error."""


def open_objects(url: str, options: Mapping[str, str] | None = None) -> ObjectStore:
    """Return the objects at a URL. Nothing is opened or sent yet.

    Args:
        options: Options of the object store by the names of the library obstore, such as ``aws_endpoint``. What is not
            given comes from the environment (``AWS_REGION`` and so on).

    Raises:
        ConfigurationError: The scheme is unknown, or the library for it is not installed.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigurationError(f"{url!r} has no scheme; write {_FORMS}")
    if scheme == "file":
        return FolderObjects(url)
    if scheme in _REMOTE:
        return RemoteObjects(url, options or {})
    raise ConfigurationError(f"{url!r} has the unknown scheme {scheme!r}; write {_FORMS}")


@contextlib.contextmanager
def _folder_errors(url: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as exc:
        raise CopyError(f"{url}: {name} is missing") from exc
    except OSError as exc:
        raise CopyError(f"{url}: {name}: {exc.strerror or exc}") from exc


class FolderObjects(ObjectStore):
    """Objects as files of a folder, such as a mounted disk. A file that was written survives a power failure."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.path = Path(unquote(parts.path))
        if parts.netloc or not self.path.is_absolute() or self.path == Path("/"):
            raise ConfigurationError(f"{url!r} must name a folder by its whole path: file:///mnt/copy, three slashes")

    def put(self, name: str, data: bytes) -> None:
        self._write(name, data, os.replace)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._write(name, data, os.link)
        except CopyError as exc:
            if isinstance(exc.__cause__, FileExistsError):
                return self.get(name) == data
            raise
        return True

    def _write(self, name: str, data: bytes, publish: Callable[[Path, Path], None]) -> None:
        path = self.path / name
        new = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        with _folder_errors(self.url, name):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
                publish(new, path)
            finally:
                new.unlink(missing_ok=True)
            Disk().sync_folder(path.parent)

    def get(self, name: str) -> bytes:
        with _folder_errors(self.url, name):
            return (self.path / name).read_bytes()

    def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with _folder_errors(self.url, prefix):
            for folder, _, names in os.walk(self.path / prefix):
                for name in names:
                    path = Path(folder, name)
                    if not name.startswith(_TEMPORARY):
                        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                            found[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return dict(sorted(found.items()))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with _folder_errors(self.url, name):
                (self.path / name).unlink(missing_ok=True)


class RemoteObjects(ObjectStore):
    """Objects in a bucket, through the library obstore.

    Args:
        options: See `open_objects`.
        store: The store of the library to use instead, for tests.
    """

    def __init__(self, url: str, options: Mapping[str, str], store: Any = None) -> None:
        self.url = url
        try:
            self._library = import_module("obstore")
            exceptions = import_module("obstore.exceptions")
        except ImportError as exc:
            raise ConfigurationError(
                f"a copy at {url} ({_REMOTE[url.partition('://')[0]]}) needs the package obstore; install it with: "
                f"{install_command('copy')}"
            ) from exc
        self._errors, self._exists = exceptions.BaseError, exceptions.AlreadyExistsError
        self._store = self._opened(options) if store is None else store

    def _opened(self, options: Mapping[str, str]) -> Any:
        scheme = self.url.partition("://")[0]
        client: dict[str, object] = {"timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=5)}
        if any(value.startswith("http://") for name, value in options.items() if name.endswith("endpoint")):
            client["allow_http"] = True
        wrong = [name for name in options if not name.startswith(_PREFIXES[scheme])]
        if wrong:
            raise ConfigurationError(
                f"mqtemplate.copy.options: {wrong[0]!r} is not an option for {scheme}://; they begin with "
                f"{_PREFIXES[scheme]!r}, such as {_PREFIXES[scheme]}endpoint"
            )
        try:
            return import_module("obstore.store").from_url(
                self.url,
                config=dict(options),
                client_options=client,
                retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": _REQUEST_TIMEOUT},
            )
        except BaseException as exc:
            if isinstance(exc, Exception) or type(exc).__name__ == "PanicException":  # obstore: an unknown option
                raise ConfigurationError(
                    f"{self.url!r} or its options (mqtemplate.copy.options) are wrong: {exc}"
                ) from exc
            raise

    @contextlib.contextmanager
    def _mapped(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:  # the library's NotFoundError
            raise CopyError(f"{self.url}: {name} is missing") from exc
        except (self._errors, OSError, ValueError) as exc:
            lines = str(exc).strip().splitlines() or [type(exc).__name__]
            raise CopyError(f"{self.url}: {name}: {lines[0][:300]}") from exc

    def put(self, name: str, data: bytes) -> None:
        with self._mapped(name):
            self._library.put(self._store, name, data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            with self._mapped(name):
                self._library.put(self._store, name, data, mode="create")
        except CopyError as exc:
            if isinstance(exc.__cause__, self._exists):
                return self.get(name) == data  # equal: our request was repeated after a lost response
            raise
        return True

    def get(self, name: str) -> bytes:
        with self._mapped(name):
            return bytes(self._library.get(self._store, name).bytes())

    def list(self, prefix: str) -> dict[str, int]:
        with self._mapped(prefix):
            pages = self._library.list(self._store, prefix.rstrip("/") or None)
            return dict(sorted((each["path"], int(each["size"])) for page in pages for each in page))

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        if not names:
            return
        try:
            with self._mapped(names[0]):
                self._library.delete(self._store, names)
        except CopyError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
            for name in names:  # some stores stop at a missing object
                self._delete(name)

    def _delete(self, name: str) -> None:
        try:
            with self._mapped(name):
                self._library.delete(self._store, name)
        except CopyError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
