"""One bucket at one endpoint: the boto3 client for control calls, signed HTTP for the bytes, and one reading of what they say.

Invariants: credentials are asked anew for every request, so that those which expire are refreshed; the clients retry nothing;
no secret enters a message; every failure leaves here as a class of ``errors.py``.

Called by ``s3`` and ``s3_upload``, which import it on first use: it loads boto3.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import io
import os
import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import boto3
import botocore.config
import botocore.exceptions
import urllib3
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.compat import HTTPHeaders
from botocore.httpsession import get_cert_path
from botocore.parsers import ResponseParserError
from botocore.utils import get_environ_proxies

from objckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    ObjckptError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)
from objckpt.store.http import (
    Answer,
    ConnectionPool,
    Endpoint,
    NoAnswerError,
    Request,
    UntrustedServerError,
    tls_context,
)
from objckpt.store.retry import is_throttling, is_transient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from botocore.credentials import ReadOnlyCredentials
    from mypy_boto3_s3 import S3Client

    from objckpt.store.s3_options import S3Options

_HOW_TO_GIVE_CREDENTIALS: Final = (
    "give storage_options key and secret (and token), or profile, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or run where an instance or pod role provides them; anon=True reads a public bucket"
)
_CONNECT_TIMEOUT: Final = 10.0
_READ_TIMEOUT: Final = 60.0

_BAD_REQUEST: Final = 400
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_MOVED: Final = 301

#: What to do about a refusal of credentials, by its code; some come with status 400.
_PERMISSION: Final = {
    "AccessDenied": "let the policy of these credentials allow it",
    "AllAccessDisabled": "the account or bucket is disabled: ask its owner",
    "ExpiredToken": "the credentials have expired: renew them, or use a source that refreshes itself",
    "InvalidAccessKeyId": "the store does not know this access key: mend `key` or the environment",
    "InvalidToken": "the session token is not valid: mend `token` or the environment",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it (NTP)",
    "SignatureDoesNotMatch": "the secret key does not fit the access key: mend `secret` or the environment",
    "TokenRefreshRequired": "the session token must be renewed",
}
#: The server received other bytes than were sent.
_CORRUPT: Final = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})

_CODE: Final = re.compile(rb"<Code>\s*([^<]*?)\s*</Code>")
_MESSAGE: Final = re.compile(rb"<Message>\s*([^<]*?)\s*</Message>")
_REGION: Final = re.compile(rb"<Region>\s*([^<]*?)\s*</Region>")


class UploadGoneError(StoreNotFoundError):
    """The store does not know the multipart upload: completed or aborted before."""


class _UnsignedPayloadAuth(S3SigV4Auth):
    """Signs headers only: a hash over the body costs more than sending it, and a CRC goes along anyway."""

    def payload(self, request: AWSRequest) -> str:
        _ = request
        return "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a store said no with. ``code`` and ``message`` come from the body, "" if it has none."""

    status: int
    code: str
    message: str
    region: str = ""

    @classmethod
    def of(cls, answer: Answer) -> _Refusal:
        """The refusal that an answer with a status other than 2xx is."""

        def text(pattern: re.Pattern[bytes]) -> str:
            found = pattern.search(answer.body)
            return html.unescape(found[1].decode("utf-8", "replace")) if found else ""

        region = answer.headers.get("x-amz-bucket-region") or text(_REGION)
        return cls(answer.status, text(_CODE), text(_MESSAGE), region)


class S3Session:
    """The way to one bucket. Safe to call from many threads; making one may read configuration files but asks no store."""

    def __init__(self, uri: str, bucket: str, root: str, options: S3Options) -> None:
        self.uri = uri
        self.bucket = bucket
        self._root = root
        self._options = options
        self._used_credentials: ReadOnlyCredentials | None = None
        try:
            session = boto3.session.Session(
                aws_access_key_id=options.key,
                aws_secret_access_key=options.secret,
                aws_session_token=options.token,
                profile_name=options.profile,
            )
            self.client: S3Client = self._make_client(session, path_style=options.endpoint_url is not None)
            #: Whether this is S3 itself, whose order and headers need no caution.
            self.is_aws = ".amazonaws." in (urlsplit(self.client.meta.endpoint_url).hostname or "")
            if not self.is_aws and options.endpoint_url is None:
                # The endpoint came from the environment or the profile.
                self.client = self._make_client(session, path_style=True)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{uri}: the S3 client cannot be made from these options: {self._clean(str(error))}"
            ) from error
        self.endpoint = self.client.meta.endpoint_url
        with self.errors(""):
            self._credentials = None if options.anon else session.get_credentials()
            parts = urlsplit(_resolved_url(self.client, bucket))
        self._base_path = parts.path.removesuffix("/x")
        self._region = self.client.meta.region_name
        self._pool = ConnectionPool(self._make_endpoint(parts.scheme, parts.hostname or "", parts.port))
        self.endpoint = f"{parts.scheme}://{parts.netloc}"

    def _make_client(self, session: boto3.session.Session, *, path_style: bool) -> S3Client:
        options = self._options
        config: dict[str, Any] = {
            "connect_timeout": min(_CONNECT_TIMEOUT, options.deadline),
            "read_timeout": min(_READ_TIMEOUT, options.deadline),
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "max_pool_connections": 32,
            **options.config_kwargs,
            "signature_version": UNSIGNED if options.anon else "s3v4",
            "retries": {"total_max_attempts": 1},
        }
        if path_style:
            # Few stores that are not AWS have a host name for each bucket.
            config["s3"] = {"addressing_style": "path", **(config.get("s3") or {})}
        client: S3Client = session.client(
            "s3",
            endpoint_url=options.endpoint_url,
            use_ssl=options.use_ssl,
            config=botocore.config.Config(**config),
            **options.client_kwargs,
        )
        if path_style:
            client.meta.events.register("before-sign.s3.DeleteObjects", _replace_checksum_by_md5)
        # As botocore has it: the argument, then the profile and AWS_CA_BUNDLE, then requests' own variable.
        self._verify: bool | str | None = options.client_kwargs.get("verify")
        if self._verify is None:
            self._verify = session._session.get_config_variable("ca_bundle")  # noqa: SLF001 # boto3 shows it nowhere else
        if self._verify is None:
            self._verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        return client

    def _make_endpoint(self, scheme: str, host: str, port: int | None) -> Endpoint:
        config: Any = self.client.meta.config
        tls = None
        certifi_bundle: str = get_cert_path(verify=True) or ""  # the one that boto3 takes
        if scheme == "https":
            try:
                tls = tls_context(
                    True if self._verify is None else self._verify, certifi_bundle, config.client_cert
                )
            except OSError as error:
                raise ConfigError(
                    f"{self.uri}: the certificates in {self._verify!r} cannot be read: {error}"
                ) from error
        proxies = get_environ_proxies(f"{scheme}://{host}") if config.proxies is None else config.proxies
        connect, read = config.connect_timeout, config.read_timeout
        if isinstance(connect, tuple | list):
            connect = connect[0]
        return Endpoint(scheme, host, port, tls, connect, read, proxies.get(scheme))

    def request(
        self,
        method: str,
        key: str,
        *,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: memoryview | bytes = b"",
        into: memoryview | None = None,
        skip: int = 0,
    ) -> Answer:
        """One signed request about an object, not retried. ``key`` is the bucket's; ``query`` is quoted. For ``into`` and ``skip``
        see :class:`~objckpt.store.http.Request`. Any status is returned; :class:`StoreTransientError` from :class:`NoAnswerError` if
        there was no answer.
        """
        target = f"{self._base_path}/{quote(key, safe='/~')}{'?' if query else ''}{query}"
        with self.errors(key):
            signed = self._sign(method, target, headers or {})
            return self._pool.exchange(Request(method, target, signed, body, into, skip))

    def _sign(self, method: str, target: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self._options.anon:
            return headers
        if self._credentials is None:
            raise botocore.exceptions.NoCredentialsError
        authority = self._pool.endpoint.authority
        request = AWSRequest(
            method,
            f"{self._pool.endpoint.scheme}://{authority}{target}",
            headers={**headers, "Host": authority},
        )
        self._used_credentials = self._credentials.get_frozen_credentials()
        _UnsignedPayloadAuth(self._used_credentials, "s3", self._region).add_auth(request)
        return dict(request.headers.items())

    @contextlib.contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Turns what boto3 and the connections raise into errors of objckpt."""
        try:
            yield
        except botocore.exceptions.ClientError as error:
            said = error.response.get("Error", {})
            meta = error.response.get("ResponseMetadata", {})
            region = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            refusal = _Refusal(
                meta.get("HTTPStatusCode", 0), said.get("Code", ""), said.get("Message", ""), region
            )
            raise self._refused(refusal, key) from error
        except NoAnswerError as error:
            raise self._unanswered(error, key) from error
        except UntrustedServerError as error:
            raise self._untrusted(str(error), key) from error
        except ResponseParserError as error:
            # A body that is no XML comes from something in between, or was cut.
            raise self._unanswered(error, key) from error
        except botocore.exceptions.BotoCoreError as error:
            raise self._from_botocore(error, key) from error

    def refused(self, answer: Answer, key: str) -> ObjckptError:
        """The error that an answer with an unwelcome status is."""
        return self._refused(_Refusal.of(answer), key)

    def is_throttled(self, answer: Answer) -> bool:
        """Whether the store turned the request away before it could have an effect."""
        refusal = _Refusal.of(answer)
        return is_throttling(refusal.status, refusal.code)

    def is_bucket_missing(self, answer: Answer) -> bool:
        """Whether a 404 is about the bucket, and not about the key."""
        return _Refusal.of(answer).code == "NoSuchBucket"

    def relative(self, key: str) -> str:
        """The bucket's key as the store's callers know it."""
        return key.removeprefix(self._root)

    def _refused(self, refusal: _Refusal, key: str) -> ObjckptError:
        status, code = refusal.status, refusal.code
        said = self._clean(f"{status} {code} {refusal.message}".strip())
        where = self._where(key)
        if code in _CORRUPT:
            return CorruptCheckpointError(
                f"{where}: the store received other bytes than were sent ({said}): send it again"
            )
        if code == "NoSuchUpload":
            text = f"{where}: the store does not know the multipart upload (aborted meanwhile?): put it again"
            return UploadGoneError(text, uri=self.uri, key=self.relative(key))
        if is_transient(status, code) and code not in _PERMISSION:
            text = f"{where}: {self.endpoint} answered {said}"
            return StoreTransientError(text, uri=self.uri, key=self.relative(key))
        if refusal.region and (status in {_MOVED, _BAD_REQUEST}) and code not in _PERMISSION:
            text = f"{where}: the bucket is in region {refusal.region}, not {self._region}: "
            text += f"give client_kwargs={{'region_name': {refusal.region!r}}} or set AWS_REGION"
            return StoreError(text, uri=self.uri, key=self.relative(key))
        if code in _PERMISSION or status in {_UNAUTHORIZED, _FORBIDDEN}:
            todo = _PERMISSION.get(code, _PERMISSION["AccessDenied"])
            return StorePermissionError(
                f"{where}: {self.endpoint} refused the request ({said}): {todo}",
                uri=self.uri,
                key=self.relative(key),
            )
        if code == "NoSuchBucket":
            text = (
                f"{where}: there is no bucket {self.bucket!r} at {self.endpoint}: create it, or mend the URI"
            )
            return StoreNotFoundError(text, uri=self.uri, key=self.relative(key))
        if status == _NOT_FOUND:
            text = f"{where}: there is no such key in the bucket: it was never written, was deleted, or the URI's prefix is wrong"
            return StoreNotFoundError(text, uri=self.uri, key=self.relative(key))
        return StoreError(
            f"{where}: {self.endpoint} refused the request ({said})", uri=self.uri, key=self.relative(key)
        )

    def _unanswered(self, error: Exception, key: str) -> StoreTransientError:
        text = f"{self._where(key)}: no answer from {self.endpoint}: {self._clean(str(error))}"
        return StoreTransientError(
            f"{text}. Is the endpoint right, and reachable from here?", uri=self.uri, key=self.relative(key)
        )

    def _untrusted(self, reason: str, key: str) -> StoreError:
        text = f"{self._where(key)}: {reason}: give client_kwargs={{'verify': '/path/to/ca.pem'}} or set AWS_CA_BUNDLE"
        return StoreError(text, uri=self.uri, key=self.relative(key))

    def _from_botocore(self, error: botocore.exceptions.BotoCoreError, key: str) -> ObjckptError:
        if isinstance(
            error,
            botocore.exceptions.NoCredentialsError
            | botocore.exceptions.PartialCredentialsError
            | botocore.exceptions.SSOError
            | botocore.exceptions.TokenRetrievalError,
        ):
            text = f"{self._where(key)}: no usable credentials ({self._clean(str(error))}): {_HOW_TO_GIVE_CREDENTIALS}"
            return StorePermissionError(text, uri=self.uri, key=self.relative(key))
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return self._untrusted(
                    f"the certificate of {self.endpoint} was not accepted: {cause.verify_message}", key
                )
            cause = cause.__cause__ or cause.__context__
        # A metadata server that hiccups during a refresh is worth another try as well.
        if isinstance(
            error,
            botocore.exceptions.HTTPClientError
            | botocore.exceptions.ConnectionError
            | botocore.exceptions.CredentialRetrievalError
            | botocore.exceptions.MetadataRetrievalError,
        ):
            return self._unanswered(error, key)
        return StoreError(
            f"{self._where(key)}: {self._clean(str(error))}", uri=self.uri, key=self.relative(key)
        )

    def _where(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def _clean(self, text: str) -> str:
        """``text`` (which a server wrote) without our secrets, should it repeat them."""
        used = self._used_credentials
        for secret in (
            self._options.secret,
            self._options.token,
            used and used.secret_key,
            used and used.token,
        ):
            if secret:
                text = text.replace(secret, "***")
        return text


def _resolved_url(client: S3Client, bucket: str) -> str:
    """The URL of the key ``x``. boto3 knows where a bucket lives (path or host style, region, dualstack, access point), but tells
    it in public only to who is about to send a request. (A presigned URL names the global endpoint, whatever the region.)
    """
    urls: list[str] = []

    def answer_instead(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        urls.append(request.url)
        return AWSResponse(request.url, 200, HTTPHeaders(), urllib3.HTTPResponse(io.BytesIO()))

    events: Any = client.meta.events  # the stubs do not know that a handler may answer
    events.register_first("before-send.s3.HeadObject", answer_instead)
    try:
        client.head_object(Bucket=bucket, Key="x")
    finally:
        events.unregister("before-send.s3.HeadObject", answer_instead)
    return urls[0]


def _replace_checksum_by_md5(request: AWSRequest, **_: object) -> None:
    """The call must carry a checksum; MD5 is the one that every S3-like store has always known."""
    for name in [
        name
        for name in request.headers
        if name.lower().startswith(("x-amz-checksum-", "x-amz-sdk-checksum-"))
    ]:
        del request.headers[name]
    body = request.body or b""
    digest = hashlib.md5(body.encode() if isinstance(body, str) else body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode("ascii")
