"""What GCS says no with, and the errors of objckpt that it becomes.

Invariants: a refusal is read the same whether it came as JSON, as XML, as a line of text or as an exception of google-cloud-storage;
what may go away by itself becomes :class:`StoreTransientError` and nothing else does.

Called by ``gcs_session``.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from objckpt.errors import (
    CorruptCheckpointError,
    ObjckptError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store.retry import is_throttling, is_transient

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.api_core.exceptions import GoogleAPICallError

    from objckpt.store.http import Answer

_BAD_REQUEST: Final = 400
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_NOT_SPOKEN: Final = frozenset({400, 404, 405, 501})

HOW_TO_GIVE_CREDENTIALS: Final = (
    "give storage_options token (the path of a key file), or set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth "
    "application-default login`, or run where the machine has a service account; token='anon' reads a public bucket"
)
_LONGEST_SHOWN: Final = 300
#: JSON's reasons that ask for patience, whatever status they come with (403 among them).
_BUSY: Final = frozenset({"backendError", "internalError", "rateLimitExceeded", "userRateLimitExceeded"})

_CODE: Final = re.compile(rb"<Code>\s*([^<]*?)\s*</Code>")
_MESSAGE: Final = re.compile(rb"<Message>\s*([^<]*?)\s*</Message>")


class UploadGoneError(StoreNotFoundError):
    """The store does not know the multipart upload: completed or aborted before."""


class BucketNotFoundError(StoreNotFoundError):
    """The bucket is missing, not only the key."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status other than 2xx. ``code`` is JSON's reason or XML's code, "" if there is none; ``message`` may be "" too."""

    status: int
    code: str
    message: str
    is_xml: bool = False

    @classmethod
    def of(cls, answer: Answer) -> Refusal:
        """The refusal that an answer is."""
        code = _CODE.search(answer.body)
        if code is not None:
            message = _MESSAGE.search(answer.body)
            return cls(answer.status, _text(code[1]), _text(message[1]) if message else "", is_xml=True)
        try:
            error = json.loads(answer.body)["error"]
            reason = error["errors"][0]["reason"] if error.get("errors") else ""
            return cls(answer.status, str(reason), str(error["message"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            return cls(answer.status, "", _text(answer.body[:_LONGEST_SHOWN]).strip())

    @classmethod
    def of_client(cls, error: GoogleAPICallError) -> Refusal:
        """The refusal that google-cloud-storage raised."""
        reasons = [entry.get("reason", "") for entry in error.errors if isinstance(entry, dict)]
        return cls(int(error.code or 0), str(reasons[0]) if reasons else "", str(error.message))

    @property
    def is_throttling(self) -> bool:
        """Whether the request was turned away before it could have an effect."""
        return is_throttling(self.status, self.code) or self.code in {
            "rateLimitExceeded",
            "userRateLimitExceeded",
        }

    @property
    def is_transient(self) -> bool:
        """Whether it may go away by itself. 409: another change of the object is under way."""
        return self.code in _BUSY or self.status == _CONFLICT or is_transient(self.status, self.code)

    @property
    def speaks_no_xml(self) -> bool:
        """Whether this is what an endpoint without the XML API says to a request for it: GCS itself refuses in XML."""
        return not self.is_xml and self.status in _NOT_SPOKEN

    @property
    def missing(self) -> str:
        """What a 404 says is missing: "bucket", "key", "upload", or "" if it does not say."""
        if self.code == "NoSuchUpload":
            return "upload"
        if self.code == "NoSuchBucket" or "bucket does not exist" in self.message:
            return "bucket"
        if self.code == "NoSuchKey" or "No such object" in self.message:
            return "key"
        return ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, as messages name it. ``clean`` takes our secrets out of what a server wrote."""

    uri: str
    bucket: str
    root: str
    endpoint: str
    clean: Callable[[str], str]

    def where(self, key: str) -> str:
        """The URI of the bucket's ``key``."""
        return f"gs://{self.bucket}/{key}"

    def relative(self, key: str) -> str:
        """The bucket's key as the store's callers know it."""
        return key.removeprefix(self.root)

    def refused(self, refusal: Refusal, key: str, *, missing: str = "") -> ObjckptError:
        """The error that a refusal is. ``missing`` says what a 404 is about, "key" if it is neither "bucket" nor "upload"."""
        said = self.clean(f"{refusal.status} {refusal.code} {refusal.message}".strip())
        where = self.where(key)
        if refusal.status == _BAD_REQUEST and (
            refusal.code == "BadDigest" or "crc32c" in refusal.message.lower()
        ):
            return CorruptCheckpointError(
                f"{where}: the store received other bytes than were sent ({said}): send it again"
            )
        if refusal.is_transient:
            return StoreTransientError(
                f"{where}: {self.endpoint} answered {said}", uri=self.uri, key=self.relative(key)
            )
        if refusal.status in {_UNAUTHORIZED, _FORBIDDEN}:
            todo = (
                "let a role of these credentials allow it"
                if refusal.status == _FORBIDDEN
                else HOW_TO_GIVE_CREDENTIALS
            )
            return StorePermissionError(
                f"{where}: {self.endpoint} refused the request ({said}): {todo}",
                uri=self.uri,
                key=self.relative(key),
            )
        if refusal.status == _NOT_FOUND and missing == "upload":
            text = f"{where}: the store does not know the multipart upload (aborted meanwhile?): put it again"
            return UploadGoneError(text, uri=self.uri, key=self.relative(key))
        if refusal.status == _NOT_FOUND and missing == "bucket":
            text = (
                f"{where}: there is no bucket {self.bucket!r} at {self.endpoint}: create it, or mend the URI"
            )
            return BucketNotFoundError(text, uri=self.uri, key=self.relative(key))
        if refusal.status == _NOT_FOUND:
            text = f"{where}: there is no such key in the bucket: it was never written, was deleted, or the URI's prefix is wrong"
            return StoreNotFoundError(text, uri=self.uri, key=self.relative(key))
        return StoreError(
            f"{where}: {self.endpoint} refused the request ({said})", uri=self.uri, key=self.relative(key)
        )

    def unanswered(self, error: Exception, key: str) -> StoreTransientError:
        """The error of a request that had no answer."""
        text = f"{self.where(key)}: no answer from {self.endpoint}: {self.clean(str(error))}"
        return StoreTransientError(
            f"{text}. Is the endpoint right, and reachable from here?", uri=self.uri, key=self.relative(key)
        )

    def untrusted(self, reason: str, key: str) -> StoreError:
        """The error of a certificate that was not accepted."""
        text = (
            f"{self.where(key)}: {reason}: set REQUESTS_CA_BUNDLE to the file of the authority that signed it"
        )
        return StoreError(text, uri=self.uri, key=self.relative(key))

    def not_logged_in(self, error: Exception, key: str) -> StorePermissionError:
        """The error of credentials that are missing or that Google does not accept."""
        text = (
            f"{self.where(key)}: no usable credentials ({self.clean(str(error))}): {HOW_TO_GIVE_CREDENTIALS}"
        )
        return StorePermissionError(text, uri=self.uri, key=self.relative(key))


def _text(raw: bytes) -> str:
    return html.unescape(raw.decode("utf-8", "replace"))
