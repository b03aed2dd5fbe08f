"""What a store said no with, and what kind of no that is.

Invariant: what a store says is read here and nowhere else, from its status, its headers and the XML of its body, whichever way
it came (signed HTTP or boto3).

Called by ``s3_session``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from objckpt.store.refusals import xml_text
from objckpt.store.retry import is_throttling

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

    from objckpt.store.http import Answer

BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
NOT_IMPLEMENTED: Final = 501
_MOVED: Final = 301
_REQUEST_TIMEOUT: Final = 408
_REDIRECTS: Final = 300
_SERVER_ERRORS: Final = 500

#: What to do about a refusal of credentials, by its code; some come with status 400.
PERMISSION: Final = {
    "AccessDenied": "let the policy of these credentials allow it",
    "AllAccessDisabled": "the account or bucket is disabled: ask its owner",
    "ExpiredToken": "the credentials have expired: renew them, or use a source that refreshes itself",
    "ExpiredTokenException": "the credentials have expired: renew them, or use a source that refreshes itself",
    "InvalidAccessKeyId": "the store does not know this access key: mend `key` or the environment",
    "InvalidToken": "the session token is not valid: mend `token` or the environment",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it (NTP)",
    "SignatureDoesNotMatch": "the secret key does not fit the access key: mend `secret` or the environment",
    "TokenRefreshRequired": "the session token must be renewed",
}
_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
#: The server received other bytes than were sent.
CORRUPT: Final = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})
_ELSEWHERE: Final = frozenset(
    {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
)
#: What stores answer that do not know a header: Backblaze, Cloudflare and old MinIO each in a way of its own.
_UNKNOWN_HEADER: Final = frozenset(
    {"", "InvalidArgument", "InvalidRequest", "NotImplemented", "UnsupportedHeader"}
)

#: It becomes a part of a host name.
_IS_REGION: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal. ``code`` and ``message`` come from the body, "" if it has none; ``region`` is where the store says that the bucket
    is, "" if it does not, or not in a form that a region has.
    """

    status: int
    code: str
    message: str
    region: str = ""

    @classmethod
    def of(cls, answer: Answer) -> Refusal:
        """The refusal that an answer with a status other than 2xx is."""
        code, message, region = (xml_text(answer.body, name) or "" for name in ("Code", "Message", "Region"))
        return cls(
            answer.status, code, message, _checked(answer.headers.get("x-amz-bucket-region") or region)
        )

    @classmethod
    def of_client_error(cls, error: ClientError) -> Refusal:
        """The refusal that boto3 raises."""
        said = error.response.get("Error", {})
        meta = error.response.get("ResponseMetadata", {})
        region = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region") or str(said.get("Region", ""))
        status, code = meta.get("HTTPStatusCode", 0), said.get("Code", "")
        if code == str(status):
            code = ""  # what boto3 makes of an answer without a body
        return cls(status, code, said.get("Message") or "", _checked(region))

    @property
    def is_expired(self) -> bool:
        """Whether the credentials were good once."""
        return self.code in _EXPIRED

    @property
    def is_elsewhere(self) -> bool:
        """Whether the bucket is in ``region``, and not where it was looked for."""
        by_status = not self.code and self.status in {_MOVED, BAD_REQUEST}  # a HEAD's answer has no body
        return bool(self.region) and (self.code in _ELSEWHERE or self.status == _MOVED or by_status)

    @property
    def is_redirect(self) -> bool:
        """Whether another host is to be asked, rather than this one with another signature."""
        return self.status == _MOVED or self.code == "PermanentRedirect"

    @property
    def may_mean_checksums(self) -> bool:
        """Whether the checksums that went along may be what the store does not know."""
        if self.status not in {BAD_REQUEST, NOT_IMPLEMENTED} or self.code in PERMISSION:
            return False
        return self.code in _UNKNOWN_HEADER or "checksum" in f"{self.code} {self.message}".lower()

    @property
    def had_no_effect(self) -> bool:
        """Whether the request was turned away for certain; a 5xx may come from something in front of a store that obeyed."""
        certain = _REDIRECTS <= self.status < _SERVER_ERRORS and self.status != _REQUEST_TIMEOUT
        return certain or self.status == NOT_IMPLEMENTED or is_throttling(self.status, self.code)


def _checked(region: str) -> str:
    return region if _IS_REGION.fullmatch(region) else ""
