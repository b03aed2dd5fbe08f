"""One bucket at one endpoint: google-cloud-storage for control calls, HTTP with a token for the bytes, and one reading of both.

Invariants: a token that has expired, or that the store refuses, is renewed before a request is given up, and the latter only
once; the client retries nothing; no secret enters a message; every failure leaves here as a class of ``errors.py``.

Called by ``gcs`` and ``gcs_upload``, which import it on first use: it loads google-cloud-storage.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import certifi
import google.api_core.exceptions
import google.auth.exceptions
import google.auth.transport.requests
import google.cloud.storage
import requests
import requests.adapters

from objckpt.errors import ConfigError, ObjckptError, StoreError, StoreTransientError
from objckpt.store.checksums import decode_crc, encode_crc32c
from objckpt.store.gcs_login import Login, credentials_for
from objckpt.store.gcs_refusals import HOW_TO_GIVE_CREDENTIALS, Refusal, error_of
from objckpt.store.http import (
    Answer,
    ConnectionPool,
    Endpoint,
    NoAnswerError,
    Request,
    UntrustedServerError,
    http_date,
    tls_context,
)
from objckpt.store.refusals import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from objckpt.store.gcs_options import GCSOptions

_CONNECT_TIMEOUT: Final = 10.0
_READ_TIMEOUT: Final = 60.0
#: Connections of control calls: they are small, and many may be under way.
CONTROL_CONNECTIONS: Final = 32

_HOW_TO_TRUST: Final = "set REQUESTS_CA_BUNDLE to the file of the authority that signed it"

_OK: Final = 200
_NO_CONTENT: Final = 204
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
_PRECONDITION_FAILED: Final = 412

#: The metadata of an object that is a part of another one: that one's key.
UPLOAD_OF: Final = "objckpt-upload-of"


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store says of an object that it holds: the CRC-32C of the whole, and its size in bytes."""

    crc32c: int
    size: int
    generation: int


class GCSSession:
    """The way to one bucket. Safe to call from many threads; making one may look for credentials but asks no store."""

    def __init__(self, uri: str, bucket: str, root: str, options: GCSOptions) -> None:
        self.uri = uri
        self.bucket = bucket
        self.timeout = (min(_CONNECT_TIMEOUT, options.deadline), min(_READ_TIMEOUT, options.deadline))
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"  # Google's clients for other languages want it without a scheme
        endpoint = options.endpoint_url or emulator or None
        self._login: Login | None = None
        self.place = Place(uri, bucket, root, endpoint or "Google's endpoint", self._clean)
        with self.errors(""):
            in_emulator = bool(emulator) and options.endpoint_url is None
            self._login = login = Login(credentials_for(options, in_emulator=in_emulator), self.timeout[0])
            self.client = self._make_client(login, options.project, endpoint)
        self.endpoint = self.client.api_endpoint.rstrip("/")
        self.place = Place(uri, bucket, root, self.endpoint, self._clean)
        self._pool = ConnectionPool(self._make_endpoint())
        #: Whether the endpoint speaks the XML API; None until somebody has asked it. Google's own does.
        self.has_xml = True if (urlsplit(self.endpoint).hostname or "").endswith("googleapis.com") else None

    def _clean(self, text: str) -> str:
        return self._login.clean(text) if self._login is not None else text

    def _make_client(
        self, login: Login, project: str | None, endpoint: str | None
    ) -> google.cloud.storage.Client:
        session = google.auth.transport.requests.AuthorizedSession(  # type: ignore[no-untyped-call] # google-auth says no types here
            login.credentials,
            # Who has no token cannot renew it.
            refresh_status_codes=() if login.is_anonymous else (_UNAUTHORIZED,),
            max_refresh_attempts=1,
            auth_request=login.transport,
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=CONTROL_CONNECTIONS))
        try:
            client = google.cloud.storage.Client(
                project=project,
                credentials=login.credentials,
                _http=session,
                client_options={"api_endpoint": endpoint} if endpoint else None,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.uri}: the GCS client cannot be made from these options: {error}"
            ) from error
        # Its first call would ask for the bucket's description, in a thread of its own and with retries, for the sake of traces; and a
        # trainer's role need not allow that.
        client._bucket_metadata_cache = None  # noqa: SLF001 # the only other switch is a variable of the whole process
        return client

    def _make_endpoint(self) -> Endpoint:
        parts = urlsplit(self.endpoint)
        # Proxies and certificates as the client's own requests have them: from the environment.
        settings = requests.Session().merge_environment_settings(self.endpoint, {}, None, None, None)
        tls = None
        if parts.scheme == "https":
            try:
                tls = tls_context(settings["verify"], certifi.where())
            except OSError as error:
                text = f"{self.uri}: the certificates in {settings['verify']!r} cannot be read: {error}"
                raise ConfigError(text) from error
        proxies = settings["proxies"]
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        return Endpoint(parts.scheme, parts.hostname or "", parts.port, tls, *self.timeout, proxy)

    # --- requests

    def request(
        self,
        method: str,
        target: str,
        key: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: memoryview | bytes | tuple[memoryview | bytes, ...] = b"",
        into: memoryview | None = None,
        skip: int = 0,
    ) -> Answer:
        """One request about the bucket's ``key``, not retried, but sent once more with a new token if the store refuses the old one.

        ``target`` is quoted; for ``into`` and ``skip`` see :class:`~objckpt.store.http.Request`. Any status is returned;
        :class:`StoreTransientError` from :class:`NoAnswerError` if there was no answer.
        """
        login = self._login
        assert login is not None

        def send() -> tuple[Answer, str | None]:
            carried = login.headers(method, self.endpoint + target)
            used = login.token
            carried |= {"Accept-Encoding": "identity", **(headers or {})}
            return self._pool.exchange(Request(method, target, carried, body, into, skip)), used

        with self.errors(key):
            answer, used = send()
            if answer.status == _UNAUTHORIZED and not login.is_anonymous:
                login.renew(used)
                answer, _ = send()
        return answer

    def blob(self, key: str) -> google.cloud.storage.Blob:
        """The client's handle of an object; nothing is asked."""
        return self.client.bucket(self.bucket).blob(key)

    def object_target(self, key: str, api: str = "/storage/v1") -> str:
        """The JSON API's path of an object; ``api`` is another one for downloads."""
        return f"{api}/b/{quote(self.bucket, safe='')}/o/{quote(key, safe='')}"

    def xml_target(self, key: str, query: str) -> str:
        """The XML API's path of an object, or of the bucket if ``key`` is "". ``query`` is quoted."""
        return f"/{quote(self.bucket)}{'/' if key else ''}{quote(key, safe='/~')}?{query}"

    def insert(
        self, key: str, data: memoryview, crc32c: int, *, if_absent: bool = False, upload_of: str = ""
    ) -> Answer:
        """Store ``data`` under ``key`` in one request that carries its CRC-32C, not retried; ``if_absent``: 412 if the key exists.

        Never resumable: the condition of such an upload is not looked at everywhere. ``upload_of`` is kept with the object as
        :data:`UPLOAD_OF`.
        """
        about: dict[str, Any] = {
            "name": key,
            "contentType": "application/octet-stream",
            "crc32c": encode_crc32c(crc32c),
        }
        if upload_of:
            about["metadata"] = {UPLOAD_OF: upload_of}
        boundary = secrets.token_hex(16)
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        query = "uploadType=multipart" + ("&ifGenerationMatch=0" if if_absent else "")
        return self.request(
            "POST",
            f"/upload/storage/v1/b/{quote(self.bucket, safe='')}/o?{query}",
            key,
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            body=(head.encode(), data, f"\r\n--{boundary}--".encode()),
        )

    def inserted(self, answer: Answer, key: str) -> Stored:
        """What a 200 of :meth:`insert` says was stored. :class:`StoreTransientError` if it was cut."""
        try:
            told = json.loads(answer.body)
        except ValueError as error:
            text = f"{self.place.where(key)}: {self.endpoint} took the object, but its answer was cut"
            raise StoreTransientError(text, uri=self.uri, key=self.place.relative(key)) from error
        return self._told(told.get("crc32c"), told.get("size"), told.get("generation"), key)

    def look(self, key: str) -> Stored:
        """What the store holds under ``key``, not retried. :class:`StoreNotFoundError` if nothing."""
        blob = self.blob(key)
        with self.errors(key):
            blob.reload(timeout=self.timeout, retry=None)
        return self.of_blob(blob, key)

    def of_blob(self, blob: google.cloud.storage.Blob, key: str) -> Stored:
        """What a handle knows after a call that filled it."""
        return self._told(blob.crc32c, blob.size, blob.generation, key)

    def _told(self, crc32c: object, size: object, generation: object, key: str) -> Stored:
        if not crc32c or size is None or not generation:
            text = f"{self.place.where(key)}: {self.endpoint} does not say CRC-32C, size and generation of what it stores"
            raise StoreError(f"{text}: it cannot be used", uri=self.uri, key=self.place.relative(key))
        return Stored(decode_crc(str(crc32c)), int(str(size)), int(str(generation)))

    def remove(self, key: str, generation: int | None = None) -> None:
        """Delete an object (or only that ``generation`` of it), not retried. If it is missing, that is no error.

        A request of our own, at a third of what the client's costs: retention deletes by the thousand.
        """
        condition = "" if generation is None else f"?ifGenerationMatch={generation}"
        answer = self.request("DELETE", self.object_target(key) + condition, key)
        if answer.status in {_OK, _NO_CONTENT, _PRECONDITION_FAILED}:
            return
        if answer.status != _NOT_FOUND or self.is_bucket_missing(Refusal.of(answer)):
            raise self.refused(answer, key)

    def now(self) -> float:
        """The store's clock, in seconds since the epoch; not retried. :class:`StoreNotFoundError` if there is no bucket."""
        answer = self._list_one()
        if answer.status != _OK:
            raise self.refused(answer, self.place.root)
        return http_date(answer.headers["Date"])

    def _list_one(self) -> Answer:
        query = f"maxResults=1&fields=kind&prefix={quote(self.place.root, safe='')}"
        return self.request("GET", f"/storage/v1/b/{quote(self.bucket, safe='')}/o?{query}", self.place.root)

    # --- errors

    def refused(self, answer: Answer, key: str) -> ObjckptError:
        """The error that an answer with an unwelcome status is."""
        return self._refused(Refusal.of(answer), key)

    def is_bucket_missing(self, refusal: Refusal) -> bool:
        """Whether a 404 is about the bucket, and not about the key. It is asked for if the refusal does not say it, as that of
        emulators does not.
        """
        return (refusal.missing or ("bucket" if self._list_one().status == _NOT_FOUND else "key")) == "bucket"

    def _refused(self, refusal: Refusal, key: str) -> ObjckptError:
        missing = refusal.missing
        if refusal.status == _NOT_FOUND and not missing and self.is_bucket_missing(refusal):
            missing = "bucket"
        return error_of(refusal, self.place, key, missing)

    @contextlib.contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Turns what google-cloud-storage, google-auth and the connections raise into errors of objckpt."""
        try:
            yield
        except google.api_core.exceptions.GoogleAPICallError as error:
            raise self._refused(Refusal.of_client(error), key) from error
        except NoAnswerError as error:
            raise self.place.unanswered(error, key) from error
        except UntrustedServerError as error:
            raise self.place.untrusted(str(error), key, _HOW_TO_TRUST) from error
        except google.auth.exceptions.GoogleAuthError as error:
            # A metadata server that hiccups is worth another try; a key that Google refuses is not.
            if isinstance(error, google.auth.exceptions.TransportError) or error.retryable:
                raise self.place.unanswered(error, key) from error
            raise self.place.no_credentials(error, key, HOW_TO_GIVE_CREDENTIALS) from error
        except requests.exceptions.RequestException as error:
            reason = _certificate_fault(error)
            if reason:
                text = f"the certificate of {self.endpoint} was not accepted: {reason}"
                raise self.place.untrusted(text, key, _HOW_TO_TRUST) from error
            raise self.place.unanswered(error, key) from error


def _certificate_fault(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause.verify_message
        # urllib3 keeps the cause in `reason` or in the arguments only.
        inner = getattr(cause, "reason", None) or next(
            (entry for entry in cause.args if isinstance(entry, BaseException)), None
        )
        cause = inner if isinstance(inner, BaseException) else cause.__cause__ or cause.__context__
    return ""
