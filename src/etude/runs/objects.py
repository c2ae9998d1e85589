"""Objects in a store (S3, Google Cloud Storage, Azure): the operations that runs and datasets need.

Credentials come from the environment or from the machine's role, never from a URL, and no text of
the store's answers is passed on, since a refused signature is answered with parts of the key.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

from etude.core.errors import EtudeError, UsageError
from etude.runs.files import store_url

T = TypeVar("T")
Version = dict[str, str]
"""Identity of a version of an object: its ETag, and a number where the store has one."""
PATIENCE = 60.0
"""Seconds for which a request that fails is repeated."""
_QUICK = 5.0
"""Seconds that a request may take, without its bytes."""
_SLOWEST = 1e5
"""Bytes per second below which a transfer counts as failed."""
_SMALL = 1 << 16
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOPELESS = re.compile(r"builder error|BadScheme|dns error|NotADirectory|InvalidEndpoint", re.I)
"""Errors that a repetition does not mend."""


class StoreFault(EtudeError):
    """The object store does not answer, or refuses."""


class Changed(EtudeError):
    """A conditional write found another version of its object."""


class Objects:
    """The objects below a URL. Failed requests are repeated for `PATIENCE` seconds."""

    def __init__(self, url: str, largest: int = _SMALL) -> None:
        """largest: bytes of the largest transfer."""
        self.url, self._largest = checked_url(url), largest

    def get(self, name: str) -> bytes | None:
        """An object; None if there is none."""
        found = self.read(name)
        return None if found is None else found[0]

    def read(self, name: str) -> tuple[bytes, Version] | None:
        """An object and its version; None if there is none."""

        def read() -> tuple[bytes, Version]:
            found = self._library.get(self._store, name)
            return bytes(found.bytes()), _version(found.meta)

        return self._existing(f"read {name}", read)

    def head(self, name: str) -> tuple[Version, float] | None:
        """(version, seconds since 1970 of its last change by the store's clock) of an object."""

        def head() -> tuple[Version, float]:
            found = self._library.head(self._store, name)
            return _version(found), found["last_modified"].timestamp()

        return self._existing(f"look at {name}", head)

    def read_ranges(self, name: str, starts: list[int], ends: list[int]) -> list[Any]:
        """Ranges of bytes of an object; close ones are read by one request."""
        found = self._existing(
            f"read {name}",
            lambda: self._library.get_ranges(self._store, name, starts=starts, ends=ends),
        )
        if found is None:
            raise StoreFault(f"{self.url}/{name} is missing.")
        return list(found)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object; repeated writes of the same bytes are the same object."""
        self._repeat(
            f"write {name}",
            lambda: self._library.put(self._store, name, data, use_multipart=False),
        )

    def swap(self, name: str, data: bytes, expected: Version | None) -> Version:
        """Write an object if it has the expected version still, or none; raises `Changed`.

        `data` must be unlike that of every other writer: whether a write whose answer was lost has
        taken place is found out by reading it back.
        """
        mode: Any = dict(expected) if expected else "create"
        end, pause = time.monotonic() + PATIENCE, _pauses()
        while True:
            try:
                written = self._library.put(self._store, name, data, mode=mode, use_multipart=False)
                return _version(written)
            except Exception as error:
                found = self.read(name)
                if found is not None and found[0] == data:
                    return found[1]
                if (found and found[1]) != expected:
                    raise Changed(f"{self.url}/{name} was written by another process.") from None
                if time.monotonic() > end or not self._is_passing(error):
                    raise self._fault(f"write {name}", error) from None
            time.sleep(next(pause))

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects below a prefix, which ends at a "/"."""

        def names() -> list[str]:
            pages = self._library.list(self._store, prefix or None)
            return [each["path"] for page in pages for each in page]

        return self._repeat("list the objects", names)

    def folders(self, prefix: str = "") -> tuple[list[str], list[str]]:
        """The names directly below a prefix: of folders, which end at a "/", and of objects."""

        def look() -> tuple[list[str], list[str]]:
            found = self._library.list_with_delimiter(self._store, prefix or None)
            inside = [f"{each.rstrip('/')}/" for each in found["common_prefixes"]]
            return sorted(inside), [each["path"] for each in found["objects"]]

        return self._repeat("list the objects", look)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, if they exist; one that is left over costs its space only."""
        if gone := sorted(names):
            with suppress(StoreFault, FileNotFoundError):
                self._repeat("delete objects", lambda: self._library.delete(self._store, gone))

    def time(self, token: str) -> float:
        """The time by the store's clock, in seconds since 1970."""
        name = f"clock/{token}"
        self.put(name, b"")
        found = self.head(name)
        self.delete([name])
        return time.time() if found is None else found[1]

    @property
    def _library(self) -> Any:
        try:
            import obstore
        except ImportError as error:
            raise UsageError(
                f"{self.url} is in an object store, which needs the library obstore: "
                "pip install 'etude[store]'."
            ) from error
        return obstore

    @cached_property
    def _store(self) -> Any:
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
        options = {
            "timeout": timedelta(seconds=_QUICK + self._largest / _SLOWEST),
            "connect_timeout": timedelta(seconds=_QUICK),
            # Without encryption only on this machine, unless the environment says otherwise.
            "allow_http": plain or urlsplit(endpoint).hostname in _LOOPBACK,
        }
        library = self._library
        try:
            return library.store.from_url(
                self.url, client_options=options, retry_config={"max_retries": 0}
            )
        except (ValueError, TypeError, library.exceptions.BaseError):
            raise UsageError(
                f"{self.url} cannot be opened: check the URL, and the variables of your object "
                "store in the environment (AWS_..., GOOGLE_..., AZURE_...)."
            ) from None

    def _existing(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return self._repeat(what, call)
        except FileNotFoundError:
            return None

    def _repeat(self, what: str, call: Callable[[], T]) -> T:
        """Call until it succeeds; an object that does not exist is an answer."""
        end, pause = time.monotonic() + PATIENCE, _pauses()
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise self._fault(what, error) from None
                raise FileNotFoundError(what) from None
            except (UsageError, MemoryError):
                raise
            except Exception as error:
                if time.monotonic() > end or not self._is_passing(error):
                    raise self._fault(what, error) from None
            time.sleep(next(pause))

    def _is_passing(self, error: Exception) -> bool:
        kinds = self._library.exceptions
        passing = isinstance(error, kinds.GenericError | kinds.JoinError | OSError)
        return passing and not _HOPELESS.search(str(error))

    def _fault(self, what: str, error: Exception) -> StoreFault:
        """An error without the text of the store's answer, which may name keys."""
        kinds, text = self._library.exceptions, str(error)
        status = re.search(r"\b([45]\d\d) [A-Z][a-z]+( [A-Z][a-z]+)*", text)
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            reason = (
                "it refuses these credentials; check those in the environment, and their rights"
            )
        elif "NoSuchBucket" in text:
            reason = "the bucket does not exist; make it first"
        elif re.search("credential|169.254", text, re.I):
            reason = "there are no credentials for it in the environment"
        elif status:
            reason = f"it answered {status[0]}"
        elif "dns error" in text:
            reason = "its name cannot be resolved; check the endpoint and the network"
        elif "imed out" in text or "imeout" in text:
            reason = "it does not answer; check the network"
        else:
            reason = "it cannot be reached; check the endpoint and the network"
        return StoreFault(f"Could not {what} in {self.url}: {reason}.")


def checked_url(text: str) -> str:
    """The URL of a place in an object store; one that holds credentials is refused, and not
    repeated."""
    url = store_url(text)
    parts = urlsplit(url)
    # abfss://CONTAINER@ACCOUNT is a place; KEY:SECRET@ is not.
    if "@" in parts.netloc and (":" in parts.netloc or not parts.scheme.startswith("abfs")):
        raise UsageError(
            "A URL of an object store must not hold credentials: put them into the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for example)."
        )
    if parts.query or parts.fragment:
        raise UsageError(
            "A URL of an object store has neither '?' nor '#': put keys and tokens into the "
            "environment (AWS_SESSION_TOKEN, AZURE_STORAGE_SAS_KEY, for example)."
        )
    if not parts.netloc or any(part in (".", "..") for part in parts.path.split("/")):
        raise UsageError(f"{url} does not name a place in an object store: s3://BUCKET/PATH.")
    return url


def _version(found: Any) -> Version:
    return {name: found[name] for name in ("e_tag", "version") if found.get(name)}


def _pauses() -> Iterator[float]:
    """Seconds before each repetition: twice as long each time, up to 2, with jitter."""
    longest = 0.1
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(2 * longest, 2.0)
