"""The way to one bucket, as boto3 knows it: client, host, region, certificates, credentials.

Invariants: boto3 alone decides where a bucket lives and who asks (profiles, roles, environment, S3 Express sessions); what it
decides for its own calls holds for the bytes' path too. Making a way asks no store.

Called by ``s3_session``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import SplitResult, urlsplit

import boto3
import botocore.config
import urllib3
from botocore import UNSIGNED
from botocore.auth import S3ExpressAuth, S3SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.compat import HTTPHeaders
from botocore.credentials import RefreshableCredentials
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from objckpt.errors import ConfigError
from objckpt.store.http import ConnectionPool, Endpoint, tls_context
from objckpt.store.s3_headers import is_directory_bucket

if TYPE_CHECKING:
    from collections.abc import Mapping

    from botocore.credentials import ReadOnlyCredentials
    from mypy_boto3_s3 import S3Client

    from objckpt.store.s3_options import S3Options

_CONNECT_TIMEOUT: Final = 10.0
_READ_TIMEOUT: Final = 60.0
#: An S3 Express session lives 5 minutes; in its last ones a request tries to renew it, or waits for that.
_EXPRESS_ADVISORY: Final = 45
_EXPRESS_MANDATORY: Final = 10


class Credentials(Protocol):
    """Where a request's credentials come from; it may renew them."""

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Those of this moment."""


@dataclass(frozen=True, slots=True)
class Way:
    """The way to a bucket. ``base_path`` stands before each key; ``region`` is the one to sign for.

    ``credentials`` are None for who has none. ``is_express``: directory buckets sign, and list, in ways of their own.
    """

    client: S3Client
    pool: ConnectionPool
    base_path: str
    region: str
    is_aws: bool
    is_express: bool
    credentials: Credentials | None

    def sign(
        self, method: str, target: str, headers: Mapping[str, str], credentials: ReadOnlyCredentials
    ) -> Mapping[str, str]:
        """``headers`` and those that prove who asks for ``target`` (quoted path and query)."""
        authority = self.pool.endpoint.authority
        url = f"{self.pool.endpoint.scheme}://{authority}{target}"
        request = AWSRequest(method, url, headers={**headers, "Host": authority})
        auth: S3SigV4Auth = (
            _ExpressUnsignedPayloadAuth(credentials, self.region)
            if self.is_express
            else _UnsignedPayloadAuth(credentials, "s3", self.region)
        )
        auth.add_auth(request)
        return dict(request.headers.items())


class _UnsignedPayloadAuth(S3SigV4Auth):
    """Signs headers only: a hash over the body costs more than sending it, and a CRC goes along anyway."""

    def payload(self, request: AWSRequest) -> str:
        _ = request
        return "UNSIGNED-PAYLOAD"


class _ExpressUnsignedPayloadAuth(S3ExpressAuth):
    """Likewise, with the token of an S3 Express session, which it is given."""

    def __init__(self, credentials: ReadOnlyCredentials, region: str) -> None:
        S3SigV4Auth.__init__(self, credentials, "s3express", region)

    def payload(self, request: AWSRequest) -> str:
        _ = request
        return "UNSIGNED-PAYLOAD"


def open_client(
    bucket: str, options: S3Options, region: str | None
) -> tuple[boto3.session.Session, S3Client]:
    """A client for ``bucket``, and the session that it is of, with credentials looked for anew. ``region`` is what a store said,
    None to go by the options. Raises what boto3 does, and ValueError and TypeError.
    """
    session = boto3.session.Session(
        aws_access_key_id=options.key,
        aws_secret_access_key=options.secret,
        aws_session_token=options.token,
        profile_name=options.profile,
    )
    if is_directory_bucket(bucket):
        return session, _make_client(session, options, region, is_directory=True)
    client = _make_client(session, options, region, path_style=options.endpoint_url is not None)
    if not _is_aws(client) and options.endpoint_url is None:
        # The endpoint came from the environment or the profile.
        client = _make_client(session, options, region, path_style=True)
    return session, client


def find_way(
    uri: str, bucket: str, options: S3Options, session: boto3.session.Session, client: S3Client
) -> Way:
    """The way to ``bucket``. Raises what boto3 does, and :class:`ConfigError` for certificates that cannot be read."""
    is_express = is_directory_bucket(bucket)
    credentials: Credentials | None = None if options.anon else session.get_credentials()
    if credentials is not None and is_express:
        credentials = _ExpressCredentials(client, bucket)
    url, region = _resolved(client, bucket)
    parts = urlsplit(url)
    # As botocore has it: the argument, then the profile and AWS_CA_BUNDLE, then requests' own variable.
    verify = options.client_kwargs.get("verify")
    if verify is None:
        verify = session._session.get_config_variable("ca_bundle")  # noqa: SLF001 # boto3 shows it nowhere else
    if verify is None:
        verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    endpoint = _make_endpoint(uri, client, verify, parts)
    return Way(
        client=client,
        pool=ConnectionPool(endpoint),
        base_path=parts.path.removesuffix("/x"),
        region=region or client.meta.region_name,
        is_aws=_is_aws(client),
        is_express=is_express,
        credentials=credentials,
    )


def _is_aws(client: S3Client) -> bool:
    return ".amazonaws." in (urlsplit(client.meta.endpoint_url).hostname or "")


def _make_client(
    session: boto3.session.Session,
    options: S3Options,
    region: str | None,
    *,
    path_style: bool = False,
    is_directory: bool = False,
) -> S3Client:
    config: dict[str, Any] = {
        "connect_timeout": min(_CONNECT_TIMEOUT, options.deadline),
        "read_timeout": min(_READ_TIMEOUT, options.deadline),
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": 32,
        **options.config_kwargs,
        "retries": {"total_max_attempts": 1},
    }
    if options.anon or not is_directory:
        # Given one, boto3 would sign for a directory bucket without its session.
        config["signature_version"] = UNSIGNED if options.anon else "s3v4"
    if path_style:
        # Few stores that are not AWS have a host name for each bucket.
        config["s3"] = {"addressing_style": "path", **(config.get("s3") or {})}
    client: S3Client = session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        use_ssl=options.use_ssl,
        config=botocore.config.Config(**config),
        **{**options.client_kwargs, **({} if region is None else {"region_name": region})},
    )
    if path_style:
        client.meta.events.register("before-sign.s3.DeleteObjects", _replace_checksum_by_md5)
    if options.s3_additional_kwargs:
        # One place for all calls: an encryption key that one of them forgot would be noticed by nobody.
        add = functools.partial(_add_arguments, options.s3_additional_kwargs)
        client.meta.events.register("before-parameter-build.s3", add)
    return client


def _make_endpoint(uri: str, client: S3Client, verify: bool | str, parts: SplitResult) -> Endpoint:
    scheme, host = parts.scheme, parts.hostname or ""
    config: Any = client.meta.config
    tls = None
    certifi_bundle: str = get_cert_path(verify=True) or ""  # the one that boto3 takes
    if scheme == "https":
        try:
            tls = tls_context(verify, certifi_bundle, config.client_cert)
        except OSError as error:
            raise ConfigError(f"{uri}: the certificates in {verify!r} cannot be read: {error}") from error
    proxies = get_environ_proxies(f"{scheme}://{host}") if config.proxies is None else config.proxies
    connect, read = config.connect_timeout, config.read_timeout
    if isinstance(connect, tuple | list):
        connect = connect[0]
    return Endpoint(scheme, host, parts.port, tls, connect, read, proxies.get(scheme))


def _resolved(client: S3Client, bucket: str) -> tuple[str, str | None]:
    """The URL of the key ``x`` and the region to sign for. boto3 knows where a bucket lives (path or host style, region, dualstack,
    zone), but tells it in public only to who is about to send a request. (A presigned URL names the global endpoint, whatever the
    region.)
    """
    found: list[tuple[str, str | None]] = []

    def answer_instead(
        params: Mapping[str, Any], context: Mapping[str, Any], **_: object
    ) -> tuple[AWSResponse, dict[str, Any]]:
        # Before it is signed: that may ask for a role or a session.
        found.append((params["url"], (context.get("signing") or {}).get("region")))
        return AWSResponse(params["url"], 200, HTTPHeaders(), urllib3.HTTPResponse(io.BytesIO())), {}

    events: Any = client.meta.events  # the stubs do not know that a handler may answer
    events.register_first("before-call.s3.HeadObject", answer_instead)
    try:
        client.head_object(Bucket=bucket, Key="x")
    finally:
        events.unregister("before-call.s3.HeadObject", answer_instead)
    return found[0]


class _ExpressCredentials:
    """Credentials of a directory bucket: a session of 5 minutes, asked for by the first request and renewed in time."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        frozen: ReadOnlyCredentials = self._session.get_frozen_credentials()
        return frozen

    @functools.cached_property
    def _session(self) -> RefreshableCredentials:
        return RefreshableCredentials.create_from_metadata(
            self._create(),
            self._create,
            "s3express",
            advisory_timeout=_EXPRESS_ADVISORY,
            mandatory_timeout=_EXPRESS_MANDATORY,
        )

    def _create(self) -> dict[str, Any]:
        said = self._client.create_session(Bucket=self._bucket)["Credentials"]
        return {
            "access_key": said["AccessKeyId"],
            "secret_key": said["SecretAccessKey"],
            "token": said["SessionToken"],
            "expiry_time": said["Expiration"].isoformat(),
        }


def _add_arguments(additional: Mapping[str, Any], params: dict[str, Any], model: Any, **_: object) -> None:
    """Add to a call's arguments those of ``additional`` that this call takes."""
    takes = model.input_shape.members
    params.update({name: value for name, value in additional.items() if name in takes})


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
