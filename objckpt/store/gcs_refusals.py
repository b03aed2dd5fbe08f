"""What GCS says no with, and the errors of objckpt that it becomes.

Invariants: a refusal is read the same whether it came as JSON, as XML, as a line of text or as an exception of google-cloud-storage;
what may go away by itself becomes :class:`StoreTransientError` and nothing else does.

Called by ``gcs_session``, ``gcs_upload`` and ``gcs``.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from objckpt.store.refusals import xml_text
from objckpt.store.retry import is_throttling, is_transient

if TYPE_CHECKING:
    from google.api_core.exceptions import GoogleAPICallError

    from objckpt.errors import ObjckptError
    from objckpt.store.http import Answer
    from objckpt.store.refusals import Place

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
        code = xml_text(answer.body, "Code")
        if code is not None:
            return cls(answer.status, code, xml_text(answer.body, "Message") or "", is_xml=True)
        try:
            error = json.loads(answer.body)["error"]
            reason = error["errors"][0]["reason"] if error.get("errors") else ""
            return cls(answer.status, str(reason), str(error["message"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            text = html.unescape(answer.body[:_LONGEST_SHOWN].decode("utf-8", "replace"))
            return cls(answer.status, "", text.strip())

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


def error_of(refusal: Refusal, place: Place, key: str, missing: str) -> ObjckptError:
    """The error that a refusal is. ``missing`` says what a 404 is about, the key if it is neither "bucket" nor "upload"."""
    said = place.clean(f"{refusal.status} {refusal.code} {refusal.message}".strip())
    if refusal.status == _BAD_REQUEST and (
        refusal.code == "BadDigest" or "crc32c" in refusal.message.lower()
    ):
        return place.corrupt(said, key)
    if refusal.is_transient:
        return place.transient(said, key)
    if refusal.status == _FORBIDDEN:
        return place.not_allowed(said, key, "let a role of these credentials allow it")
    if refusal.status == _UNAUTHORIZED:
        return place.not_allowed(said, key, HOW_TO_GIVE_CREDENTIALS)
    if refusal.status != _NOT_FOUND:
        return place.refused(said, key)
    if missing == "upload":
        return place.no_upload(key)
    return place.no_bucket(key) if missing == "bucket" else place.no_key(key)
