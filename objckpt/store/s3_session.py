"""One bucket at one endpoint: the boto3 client for control calls, signed HTTP for the bytes, and what is learned from refusals.

Invariants: credentials are asked anew for every request, so that those which expire are refreshed; the clients retry nothing;
no secret enters a message; every failure leaves here as a class of ``errors.py``. A refusal that tells how to do better (another
region, expired credentials, checksums that the store does not know) is learned from once, for both ways, and leaves as one to
be tried again.

Called by ``s3`` and ``s3_upload``, which import it on first use: it loads boto3.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import ssl
import threading
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import botocore.exceptions
from botocore.parsers import ResponseParserError

from objckpt.errors import ConfigError, ObjckptError, StoreError
from objckpt.store.checksums import encode_crc64
from objckpt.store.http import Answer, NoAnswerError, Request, UntrustedServerError
from objckpt.store.refusals import Place
from objckpt.store.retry import is_transient
from objckpt.store.s3_connect import Way, find_way, open_client
from objckpt.store.s3_headers import ON_ALL, ON_WRITES, headers_of
from objckpt.store.s3_refusal import (
    CORRUPT,
    FORBIDDEN,
    NOT_FOUND,
    PERMISSION,
    UNAUTHORIZED,
    Refusal,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from botocore.credentials import ReadOnlyCredentials
    from mypy_boto3_s3 import S3Client

    from objckpt.store.s3_connect import Credentials
    from objckpt.store.s3_options import S3Options

_log = logging.getLogger("objckpt.store")

_HOW_TO_GIVE_CREDENTIALS: Final = (
    "give storage_options key and secret (and token), or profile, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or run where an instance or pod role provides them; anon=True reads a public bucket"
)
_HOW_TO_TRUST: Final = "give client_kwargs={'verify': '/path/to/ca.pem'} or set AWS_CA_BUNDLE"
CRC_HEADER: Final = "x-amz-checksum-crc64nvme"
_MD5_HEADER: Final = "Content-MD5"
_REDIRECTS: Final = 300


class _Used(threading.local):
    """What this thread's last request went with, so that a refusal of it says something of that and not of what others learned
    meanwhile. ``crc``: whether it carried our checksums, None where that is no question. ``credentials``: None if boto3 signed it.
    ``learning``: a refusal is being learned from, and one on the way there is only told.
    """

    way: Way | None = None
    crc: bool | None = None
    credentials: ReadOnlyCredentials | None = None
    learning: bool = False


class S3Session:
    """The way to one bucket. Safe to call from many threads; making one may read configuration files but asks no store."""

    def __init__(self, uri: str, bucket: str, root: str, options: S3Options) -> None:
        self.uri = uri
        self.bucket = bucket
        self._root = root
        self._options = options
        self._headers = headers_of(options.s3_additional_kwargs, ON_ALL)
        self._write_headers = headers_of(options.s3_additional_kwargs, ON_WRITES)
        self._used_credentials: ReadOnlyCredentials | None = None
        self._used = _Used()
        self._lock = threading.Lock()
        self._region: str | None = None
        self._renewed: Way | None = None
        self.endpoint = options.endpoint_url or "the store"
        self._way: Way
        self._credentials: Credentials | None = None
        self._take(self._find_way(None))
        self.is_aws = self._way.is_aws
        #: Whether it is a directory bucket, which knows folders and no order.
        self.is_express = self._way.is_express
        self._sends_crc = True
        #: Whether it is known that the store takes, or does not take, our checksums; Amazon's takes them.
        self._crc_is_settled = self.is_aws
        self._crc_doubt: Refusal | None = None

    @property
    def client(self) -> S3Client:
        """boto3's client for control calls, which are made inside :meth:`errors`."""
        return self._way.client

    @property
    def sends_crc(self) -> bool:
        """Whether writes carry CRC-64/NVME; Content-MD5, which is older, if the store does not know that."""
        return self._sends_crc

    def _find_way(self, region: str | None) -> Way:
        try:
            session, client = open_client(self.bucket, self._options, region)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.uri}: the S3 client cannot be made from these options: {self._clean(str(error))}"
            ) from error
        with self._mapped("", None):
            return find_way(self.uri, self.bucket, self._options, session, client)

    def _take(self, way: Way) -> None:
        self._way = way
        self._credentials = way.credentials
        endpoint = way.pool.endpoint
        self.endpoint = f"{endpoint.scheme}://{endpoint.authority}"

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
        crc = None
        sent = {**self._headers, **(headers or {})}
        if method == "PUT":
            crc = CRC_HEADER in sent
            if not query:
                sent |= self._write_headers
        with self._mapped(key, crc):
            way = self._way
            target = f"{way.base_path}/{quote(key, safe='/~')}{'?' if query else ''}{query}"
            signed = self._sign(way, method, target, sent)
            answer = way.pool.exchange(Request(method, target, signed, body, into, skip))
        if answer.status < _REDIRECTS:
            self._went_well()
        return answer

    def _sign(self, way: Way, method: str, target: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self._options.anon:
            return headers
        if self._credentials is None:
            raise botocore.exceptions.NoCredentialsError
        credentials = self._credentials.get_frozen_credentials()
        self._used.credentials = self._used_credentials = credentials
        return way.sign(method, target, headers, credentials)

    def checksum(self, body: memoryview, crc64: int) -> dict[str, str]:
        """The header by which the store checks that it received ``body``, whose CRC-64/NVME is ``crc64``."""
        if self._sends_crc:
            return {CRC_HEADER: encode_crc64(crc64)}
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        return {_MD5_HEADER: base64.b64encode(digest).decode("ascii")}

    def confirms(self, answer: Answer, checksum: Mapping[str, str]) -> bool:
        """Whether the store has confirmed that it received what was sent with :meth:`checksum`. Who takes a CRC-64/NVME has checked
        it; an MD5 may have been ignored, but is mostly the ETag (not where the store encrypts with a key of its own).
        """
        if CRC_HEADER in checksum:
            return True
        etag = answer.headers.get("ETag", "").strip('"').lower()
        return etag == base64.b64decode(checksum[_MD5_HEADER]).hex()

    @contextlib.contextmanager
    def errors(self, key: str, *, crc: bool | None = None) -> Iterator[None]:
        """Around a call of :attr:`client`: turns what boto3 raises into errors of objckpt. ``crc``: whether the call carries our
        checksums, None where it could not.
        """
        with self._mapped(key, crc):
            yield
        self._went_well()

    @contextlib.contextmanager
    def _mapped(self, key: str, crc: bool | None) -> Iterator[None]:
        used = self._used
        used.way, used.crc, used.credentials = getattr(self, "_way", None), crc, None
        try:
            yield
        except botocore.exceptions.ClientError as error:
            raise self._refused(Refusal.of_client_error(error), key) from error
        except NoAnswerError as error:
            raise self.place.unanswered(error, key) from error
        except UntrustedServerError as error:
            raise self.place.untrusted(str(error), key, _HOW_TO_TRUST) from error
        except ResponseParserError as error:
            # A body that is no XML comes from something in between, or was cut.
            raise self.place.unanswered(error, key) from error
        except botocore.exceptions.BotoCoreError as error:
            raise self._from_botocore(error, key) from error

    def refused(self, answer: Answer, key: str) -> ObjckptError:
        """The error that the answer to this thread's last request is, if its status is unwelcome."""
        return self._refused(Refusal.of(answer), key)

    def had_no_effect(self, answer: Answer) -> bool:
        """Whether a refused request did nothing, for certain."""
        return Refusal.of(answer).had_no_effect

    # ------------------------------------------------------------- learning from refusals

    def _went_well(self) -> None:
        """Tell that the last request of this thread was granted."""
        if self._renewed is not None:
            self._renewed = None
        if self._crc_doubt is not None and self._used.crc is False:
            with self._lock:
                doubt, self._crc_doubt = self._crc_doubt, None
                self._crc_is_settled = True
            if doubt is not None:
                _log.warning(
                    "%s does not know CRC-64/NVME checksums (it said %s): writes carry Content-MD5 instead, and what the store does "
                    "not confirm is read back",
                    self.uri,
                    self._clean(f"{doubt.status} {doubt.code} {doubt.message}".strip()),
                )

    def _learned(self, refusal: Refusal) -> str:
        """What was learned from a refusal of this thread's last request, so that it is worth another try; "" if nothing."""
        used = self._used
        if used.way is None or used.learning:
            return ""
        used.learning = True
        try:
            with self._lock:
                if not (refusal.is_elsewhere or refusal.is_expired):
                    return self._doubted(refusal)
                if used.way is not self._way:
                    return "the way to the bucket has changed meanwhile"
                return self._followed(refusal) if refusal.is_elsewhere else self._renew()
        finally:
            used.learning = False

    def _followed(self, refusal: Refusal) -> str:
        old, region = self._way, refusal.region
        if self._region is not None or region == old.region:
            return ""
        way = self._find_way(region)
        if refusal.is_redirect and way.pool.endpoint.authority == old.pool.endpoint.authority:
            # The endpoint was given, and it is another one that is wanted.
            return ""
        text = "%s is in region %s, not %s: following. client_kwargs={'region_name': %r}, or AWS_REGION, saves the detour"
        _log.warning(text, self.uri, region, old.region, region)
        self._region = region
        self._take(way)
        return f"the bucket is in region {region}"

    def _renew(self) -> str:
        """Look for credentials as at the beginning: what expired may lie renewed in a file, or be had from its source again."""
        refused, old = self._used.credentials, self._credentials
        if old is None or self._renewed is self._way:
            return ""
        try:
            known = old.get_frozen_credentials()
            if refused is not None and refused != known:
                return "the credentials were renewed meanwhile"
            way = self._find_way(self._region)
            if way.credentials is None or way.credentials.get_frozen_credentials() == known:
                return ""
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, ObjckptError) as error:
            # What the store said is told; this only adds why nothing came of it.
            _log.warning(
                "%s: expired credentials could not be renewed: %s", self.uri, self._clean(str(error))
            )
            return ""
        _log.info("%s: the credentials have expired and were renewed", self.uri)
        self._take(way)
        self._renewed = way
        return "the credentials were renewed"

    def _doubted(self, refusal: Refusal) -> str:
        """Leave our checksums out if they may be the reason; take them back if the store refuses alike without them."""
        crc, doubt = self._used.crc, self._crc_doubt
        if crc is None or not refusal.may_mean_checksums:
            return ""
        if crc and not self._sends_crc:
            return "checksums are left out since"
        if self._crc_is_settled:
            return ""
        if crc:
            self._sends_crc, self._crc_doubt = False, refusal
            return "it goes without our checksums next"
        if doubt is not None and (refusal.status, refusal.code) == (doubt.status, doubt.code):
            self._sends_crc, self._crc_doubt, self._crc_is_settled = True, None, True
        return ""

    @property
    def place(self) -> Place:
        """Where requests go now, as messages name it."""
        return Place(self.uri, self.bucket, self._root, self.endpoint, self._clean)

    def _refused(self, refusal: Refusal, key: str) -> ObjckptError:
        status, code = refusal.status, refusal.code
        said = self._clean(f"{status} {code} {refusal.message}".strip())
        # As they were when the request went: they may change by what is learned.
        place, region = self.place, self._used.way.region if self._used.way else ""
        if code in CORRUPT:
            return place.corrupt(said, key)
        if code == "NoSuchUpload":
            return place.no_upload(key)
        learned = self._learned(refusal)
        if learned or (is_transient(status, code) and code not in PERMISSION):
            return place.transient(f"{said} ({learned})" if learned else said, key)
        if refusal.is_elsewhere:
            text = f"{place.where(key)}: the bucket is in region {refusal.region}, not {region}: "
            text += f"give client_kwargs={{'region_name': {refusal.region!r}}} or set AWS_REGION, and no endpoint_url of another region"
            return StoreError(text, uri=self.uri, key=place.relative(key))
        if code in PERMISSION or status in {UNAUTHORIZED, FORBIDDEN}:
            return place.not_allowed(said, key, PERMISSION.get(code, PERMISSION["AccessDenied"]))
        if code == "NoSuchBucket":
            return place.no_bucket(key)
        return place.no_key(key) if status == NOT_FOUND else place.refused(said, key)

    def _from_botocore(self, error: botocore.exceptions.BotoCoreError, key: str) -> ObjckptError:
        place = self.place
        if isinstance(
            error,
            botocore.exceptions.NoCredentialsError
            | botocore.exceptions.PartialCredentialsError
            | botocore.exceptions.SSOError
            | botocore.exceptions.TokenRetrievalError,
        ):
            return place.no_credentials(error, key, _HOW_TO_GIVE_CREDENTIALS)
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                text = f"the certificate of {self.endpoint} was not accepted: {cause.verify_message}"
                return place.untrusted(text, key, _HOW_TO_TRUST)
            cause = cause.__cause__ or cause.__context__
        # A metadata server that hiccups during a refresh is worth another try as well.
        if isinstance(
            error,
            botocore.exceptions.HTTPClientError
            | botocore.exceptions.ConnectionError
            | botocore.exceptions.CredentialRetrievalError
            | botocore.exceptions.MetadataRetrievalError,
        ):
            return place.unanswered(error, key)
        text = f"{place.where(key)}: {self._clean(str(error))}"
        return StoreError(text, uri=self.uri, key=place.relative(key))

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
