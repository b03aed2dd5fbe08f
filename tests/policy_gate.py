"""An S3 endpoint that obeys IAM policies, in front of one that does not.

It maps each request to the actions that IAM asks for, evaluates them against an identity's policy and the bucket's, refuses or
passes the request on, and keeps what was asked for. What it does not know it does not guess: such a request raises.
"""

from __future__ import annotations

import fnmatch
import http.client
import re
import threading
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Call:
    """One action on one resource. ``context`` holds the condition keys that AWS would know; one that is not in it is absent."""

    action: str
    resource: str
    context: dict[str, str] = field(default_factory=dict, hash=False)


def _matches(pattern, text):
    # IAM knows * and ? alone, and both match slashes.
    return re.fullmatch(fnmatch.translate(pattern.replace("[", "[[]")), text) is not None


def _listed(value):
    return value if isinstance(value, list) else [value]


_OPERATORS = {
    "StringEquals": lambda wanted, found: found is not None and found in wanted,
    "StringLike": lambda wanted, found: found is not None and any(_matches(w, found) for w in wanted),
    "Bool": lambda wanted, found: found is not None and found in wanted,
    "NumericLessThan": lambda wanted, found: (
        found is not None and any(float(found) < float(w) for w in wanted)
    ),
    "Null": lambda wanted, found: str(found is None).lower() in wanted,
}


def applies(statement, call):
    """Whether a statement says anything about a call. KeyError for an operator or an element that is not known here."""
    assert statement.keys() <= {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}, statement
    return (
        any(_matches(pattern, call.action) for pattern in _listed(statement["Action"]))
        and any(_matches(pattern, call.resource) for pattern in _listed(statement["Resource"]))
        and all(
            _OPERATORS[operator](_listed(wanted), call.context.get(key))
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def denies(policy, call):
    return any(s["Effect"] == "Deny" and applies(s, call) for s in policy["Statement"])


def allows(identity, bucket_policy, call):
    """As AWS decides within one account: an explicit deny wins, and somebody must allow it."""
    if denies(identity, call) or denies(bucket_policy, call):
        return False
    return any(s["Effect"] == "Allow" and applies(s, call) for s in identity["Statement"])


@dataclass(frozen=True)
class Rights:
    """Who asks: the policy of the role, the bucket's, and the key that encrypts the bucket."""

    identity: dict
    bucket_policy: dict
    kms_key: str
    region: str

    def calls(self, method, target, headers, body):
        """The actions that a request needs."""
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path.removeprefix("/")).partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        context = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}  # as it would be on AWS
        listing = {**context, "s3:prefix": query.get("prefix", "")}
        creation = {**context, "s3:ObjectCreationOperation": "true"}
        if "if-none-match" in headers:
            creation["s3:if-none-match"] = headers["if-none-match"]
        part = {**context, "s3:ObjectCreationOperation": "false"}
        arn = f"arn:aws:s3:::{bucket}"

        def kms(action):
            return Call(f"kms:{action}", self.kms_key, {"kms:ViaService": f"s3.{self.region}.amazonaws.com"})

        names = query.keys() & {"list-type", "uploads", "delete", "uploadId", "partNumber"}
        match method, bool(key), tuple(sorted(names)):
            case "GET" | "HEAD", True, ():
                return [Call("s3:GetObject", f"{arn}/{key}", context), kms("Decrypt")]
            case "PUT", True, ():
                return [Call("s3:PutObject", f"{arn}/{key}", creation), kms("GenerateDataKey")]
            case "POST", True, ("uploads",):
                return [Call("s3:PutObject", f"{arn}/{key}", part), kms("GenerateDataKey")]
            case "PUT", True, ("partNumber", "uploadId"):
                return [Call("s3:PutObject", f"{arn}/{key}", part), kms("Decrypt")]
            case "POST", True, ("uploadId",):
                return [Call("s3:PutObject", f"{arn}/{key}", creation), kms("Decrypt")]
            case "DELETE", True, ("uploadId",):
                return [Call("s3:AbortMultipartUpload", f"{arn}/{key}", context)]
            case "POST", False, ("delete",):
                keys = [e.text for e in ET.fromstring(body).iter() if e.tag.endswith("Key")]
                return [Call("s3:DeleteObject", f"{arn}/{name}", context) for name in keys]
            case "GET", False, ("list-type",):
                return [Call("s3:ListBucket", arn, listing)]
            case "GET", False, ("uploads",):
                # The service authorization reference gives this action no s3:prefix.
                return [Call("s3:ListBucketMultipartUploads", arn, context)]
            case other:
                raise NotImplementedError(f"which actions does {other} need? {target}")

    def allow(self, call):
        return allows(self.identity, self.bucket_policy, call)


class PolicyGate:
    """A context manager. ``asked`` and ``refused`` are the calls so far; ``failure`` is what it could not map."""

    def __init__(self, upstream, rights):
        self.upstream, self.rights = urlsplit(upstream).netloc, rights
        self.asked, self.refused, self.failure = [], [], None
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                """Not to stderr."""

            def answer(self):
                gate.serve(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 # http.server's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def actions(self):
        assert self.failure is None, self.failure
        return {call.action for call in self.asked}

    def serve(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        try:
            calls = self.rights.calls(request.command, request.path, request.headers, body)
        except Exception as error:
            self.failure = error
            return _send(request, 501, [], b"")
        refused = [call for call in calls if not self.rights.allow(call)]
        self.asked += calls
        self.refused += refused
        if refused and "?delete" in request.path:
            # A bulk delete is answered key by key; a mixed one is not needed here.
            assert len(refused) == len(calls)
            errors = "".join(
                f"<Error><Key>{escape(call.resource.partition('/')[2])}</Key><Code>AccessDenied</Code></Error>"
                for call in refused
            )
            return _send(request, 200, [], f"<DeleteResult>{errors}</DeleteResult>".encode())
        if refused:
            text = f"<Error><Code>AccessDenied</Code><Message>{escape(str(refused))}</Message></Error>"
            return _send(request, 403, [], text.encode())
        return self._pass_on(request, body)

    def _pass_on(self, request, body):
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        try:
            # The Host stays the one that was signed.
            headers = {k: v for k, v in request.headers.items() if k.lower() not in {"expect", "connection"}}
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            _send(request, answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()


def _send(request, status, headers, body):
    request.send_response_only(status)
    length = str(len(body))
    for name, value in headers:
        if request.command == "HEAD" and name.lower() == "content-length":
            length = value
        elif name.lower() not in {"content-length", "transfer-encoding", "connection"}:
            request.send_header(name, value)
    request.send_header("Content-Length", length)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def without(call, key):
    """The same call, had the client left something out."""
    return replace(call, context={k: v for k, v in call.context.items() if k != key})
