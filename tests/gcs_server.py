"""A small GCS in a thread: the JSON and the XML API as far as the store under test uses them, as the documentation has them.

It keeps to what emulators leave out: preconditions are heeded wherever they are sent and decided under one lock, every checksum that is
sent is compared, tokens are issued by a token endpoint and checked, multipart uploads have a smallest part. ``fault`` sees each call
before it is carried out, and may change its body, refuse it, or have its answer lost.
"""

from __future__ import annotations

import base64
import email.utils
import functools
import itertools
import json
import socket
import threading
import time
import uuid
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import google_crc32c
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

SMALLEST_PART = 5 << 20
MOST_SOURCES = 32


@dataclass(frozen=True)
class Stored:
    data: bytes
    generation: int
    created: float
    metadata: dict[str, str] = field(default_factory=dict)
    components: int | None = None


@dataclass
class Upload:
    bucket: str
    key: str
    began: float
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class Call:
    """A request as a fault sees it."""

    method: str
    path: str
    query: dict[str, str]
    headers: object
    body: bytes
    loses_answer: bool = False

    @property
    def is_xml(self):
        return not self.path.startswith(("/storage/", "/upload/", "/download/", "/token"))

    def flip(self, at=-1000):
        """A bit changes on the line."""
        changed = bytearray(self.body)
        changed[at] ^= 1
        self.body = bytes(changed)


class RefusalError(Exception):
    def __init__(self, status, code, message="", **headers):
        super().__init__(status, code, message)
        self.status, self.code, self.message, self.headers = status, code, message or code, headers


def no_bucket():
    return RefusalError(404, "NoSuchBucket", "The specified bucket does not exist.")


def no_key(bucket, key):
    return RefusalError(404, "NoSuchKey", f"No such object: {bucket}/{key}")


def crc32c(data):
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


@functools.cache
def private_key():
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class GCSServer:
    """``buckets[name][key]`` is a :class:`Stored`; ``asked`` are the calls in their order."""

    def __init__(self, *, smallest_part=SMALLEST_PART):
        self.smallest_part = smallest_part
        self.verifies = True
        #: Seconds, and calls, that a token issued from now on is good for; only the seconds are told.
        self.lifetime, self.uses = 3600, 1 << 40
        self.buckets = {}
        self.uploads = {}
        self.tokens = {}
        self.issued = Counter()
        self.asked = []
        self.fault = None
        self.lock = threading.RLock()
        self._generations = itertools.count(1_700_000_000_000_000)

    def __enter__(self):
        server = self

        class Handler(_Handler):
            gcs = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def make_bucket(self):
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.buckets[name] = {}
        return name

    def options(self, role="writer", **more):
        """``storage_options`` with the key file of a service account that may do this much."""
        pem = private_key().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        key = {
            "type": "service_account",
            "client_email": f"{role}@test",
            "private_key": pem.decode(),
            "token_uri": f"{self.url}/token",
        }
        return {"token": key, "endpoint_url": self.url, **more}

    def store(self, bucket, key, data, metadata=None, components=None):
        with self.lock:
            stored = Stored(data, next(self._generations), time.time(), metadata or {}, components)
            self.buckets[bucket][key] = stored
        return stored


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    gcs: GCSServer

    def log_message(self, *_):
        pass

    def _serve(self):
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        call = Call(self.command, parts.path, query, self.headers, body)
        self.gcs.asked.append(call)
        try:
            if call.path != "/token":
                if self.gcs.fault is not None:
                    self.gcs.fault(call)
                self._authorize(call)
            answer = self._route(call)
        except RefusalError as refusal:
            answer = self._refused(call, refusal)
        if call.loses_answer:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer(*answer)

    do_GET = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 # http.server's names

    def _answer(self, status, body=b"", kind="application/json", headers=None):
        self.send_response(status)
        self.send_header("Date", email.utils.formatdate(usegmt=True))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def send_response(self, code, message=None):
        self.log_request(code)
        self.send_response_only(code, message)

    def _refused(self, call, refusal):
        if call.path == "/token":
            return refusal.status, json.dumps({"error": refusal.code}).encode()
        if call.is_xml:
            text = f"<Error><Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message></Error>"
            return refusal.status, text.encode(), "application/xml", refusal.headers
        if call.query.get("alt") == "media":
            return refusal.status, refusal.message.encode(), "text/html; charset=UTF-8", refusal.headers
        # Raised with XML's code, which begins with a capital, or with JSON's reason.
        reasons = {404: "notFound", 401: "authError", 403: "forbidden"}
        reason = reasons.get(refusal.status, "invalid") if refusal.code[0].isupper() else refusal.code
        error = {
            "code": refusal.status,
            "message": refusal.message,
            "errors": [{"reason": reason, "message": refusal.message}],
        }
        return refusal.status, json.dumps({"error": error}).encode(), "application/json", refusal.headers

    def _authorize(self, call):
        token = call.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.gcs.lock:
            role, uses = self.gcs.tokens.get(token, (None, 0))
            if role is None or uses == 0:
                raise RefusalError(401, "AuthenticationRequired", "Invalid Credentials")
            self.gcs.tokens[token] = (role, uses - 1)
        if role != "writer" and call.method != "GET":
            raise RefusalError(
                403, "AccessDenied", f"{role}@test does not have storage.objects.create access"
            )

    def _route(self, call):
        if call.path == "/token":
            return self._token(call)
        path = call.path.removeprefix("/upload").removeprefix("/download")
        if path.startswith("/storage/v1/b/"):
            bucket, _, rest = path.removeprefix("/storage/v1/b/").partition("/")
            bucket = unquote(bucket)
            with self.gcs.lock:
                if bucket not in self.gcs.buckets:
                    raise no_bucket()
                if rest == "o":
                    return self._list(call, bucket) if call.method == "GET" else self._insert(call, bucket)
                key, _, verb = rest.removeprefix("o/").partition("/")
                if verb == "compose":
                    return self._compose(call, bucket, unquote(key))
                return self._object(call, bucket, unquote(key))
        bucket, _, key = call.path[1:].partition("/")
        with self.gcs.lock:
            if bucket not in self.gcs.buckets:
                raise no_bucket()
            return self._xml(call, bucket, unquote(key))

    # --- tokens

    def _token(self, call):
        form = dict(parse_qsl(call.body.decode()))
        signed, _, signature = form["assertion"].rpartition(".")
        claims = json.loads(base64.urlsafe_b64decode(signed.split(".")[1] + "=="))
        raw = base64.urlsafe_b64decode(signature + "==")
        private_key().public_key().verify(raw, signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        role = claims["iss"].removesuffix("@test")
        if role not in {"writer", "reader"}:
            raise RefusalError(400, "invalid_grant")
        token = f"ya29.{uuid.uuid4().hex}"
        with self.gcs.lock:
            self.gcs.tokens[token] = (role, self.gcs.uses)
            self.gcs.issued[role] += 1
        answer = {"access_token": token, "expires_in": self.gcs.lifetime, "token_type": "Bearer"}
        return 200, json.dumps(answer).encode()

    # --- the JSON API

    def _check(self, call, bucket, key):
        """The preconditions of a JSON call, against what is there."""
        found = self.gcs.buckets[bucket].get(key)
        now = found.generation if found else 0
        if int(call.query.get("ifGenerationMatch", now)) != now:
            raise RefusalError(
                412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold."
            )
        if int(call.query.get("ifGenerationNotMatch", now - 1)) == now:
            raise RefusalError(304, "notModified")

    def _verify(self, sent, data):
        if sent and self.gcs.verifies and sent != crc32c(data):
            text = f'Provided CRC32C "{sent}" doesn\'t match calculated CRC32C "{crc32c(data)}".'
            raise RefusalError(400, "invalid", text)

    def _resource(self, bucket, key):
        stored = self.gcs.buckets[bucket][key]
        created = datetime.fromtimestamp(stored.created, UTC).isoformat(timespec="milliseconds")
        about = {
            "kind": "storage#object",
            "name": key,
            "bucket": bucket,
            "generation": str(stored.generation),
            "size": str(len(stored.data)),
            "crc32c": crc32c(stored.data),
            "timeCreated": created.replace("+00:00", "Z"),
            "updated": created.replace("+00:00", "Z"),
            "metadata": stored.metadata,
        }
        return about | ({"componentCount": stored.components} if stored.components else {})

    def _insert(self, call, bucket):
        if call.query.get("uploadType") != "multipart":
            raise RefusalError(501, "notImplemented", "only uploadType=multipart is to be used")
        boundary = call.headers["Content-Type"].partition("boundary=")[2].encode()
        _, first, second = call.body.split(b"--" + boundary, 2)
        about = json.loads(first.partition(b"\r\n\r\n")[2])
        data = second.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n--" + boundary + b"--")
        self._verify(about.get("crc32c"), data)
        self._check(call, bucket, about["name"])
        self.gcs.store(bucket, about["name"], data, about.get("metadata"))
        return 200, json.dumps(self._resource(bucket, about["name"])).encode()

    def _list(self, call, bucket):
        query = call.query
        prefix, start = query.get("prefix", ""), query.get("startOffset", "")
        after = base64.b64decode(query.get("pageToken", "")).decode()
        names = [
            name
            for name in sorted(self.gcs.buckets[bucket], key=str.encode)
            if name.startswith(prefix) and name >= start and name > after
        ]
        page = names[: min(int(query.get("maxResults", 1000)), 1000)]
        answer = {"kind": "storage#objects", "items": [self._resource(bucket, name) for name in page]}
        if len(page) < len(names):
            answer["nextPageToken"] = base64.b64encode(page[-1].encode()).decode()
        return 200, json.dumps(answer).encode()

    def _object(self, call, bucket, key):
        self._check(call, bucket, key)
        stored = self.gcs.buckets[bucket].get(key)
        if stored is None:
            raise no_key(bucket, key)
        if call.method == "DELETE":
            del self.gcs.buckets[bucket][key]
            return 204, b""
        if call.query.get("alt") == "media":
            return self._media(call, stored)
        return 200, json.dumps(self._resource(bucket, key)).encode()

    def _media(self, call, stored):
        headers = {"x-goog-hash": f"crc32c={crc32c(stored.data)}"}
        asked = call.headers.get("Range")
        if asked is None:
            return 200, stored.data, "application/octet-stream", headers
        first, _, last = asked.removeprefix("bytes=").partition("-")
        size = len(stored.data)
        if int(first) >= size:
            raise RefusalError(416, "InvalidRange", Content_Range=f"bytes */{size}")
        data = stored.data[int(first) : int(last) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        return 206, data, "application/octet-stream", headers

    def _compose(self, call, bucket, key):
        asked = json.loads(call.body)
        sources = [source["name"] for source in asked["sourceObjects"]]
        if not 1 <= len(sources) <= MOST_SOURCES:
            raise RefusalError(
                400, "invalid", "The number of source components provided must be between 1 and 32."
            )
        self._check(call, bucket, key)
        for source in sources:
            if source not in self.gcs.buckets[bucket]:
                raise no_key(bucket, source)
        found = [self.gcs.buckets[bucket][source] for source in sources]
        components = sum(stored.components or 1 for stored in found)
        data = b"".join(stored.data for stored in found)
        self.gcs.store(bucket, key, data, asked.get("destination", {}).get("metadata"), components)
        return 200, json.dumps(self._resource(bucket, key)).encode()

    # --- the XML API

    def _xml(self, call, bucket, key):
        query = call.query
        if any(name.lower().startswith("x-goog-if-") for name in call.headers):
            raise RefusalError(400, "InvalidArgument", "Preconditions are not supported for this operation.")
        if not key and call.method == "GET" and "uploads" in query:
            return self._list_uploads(query, bucket)
        if call.method == "POST" and "uploads" in query:
            upload_id = uuid.uuid4().hex
            self.gcs.uploads[upload_id] = Upload(bucket, key, time.time())
            text = f"<UploadId>{upload_id}</UploadId>"
            return self._xml_answer("InitiateMultipartUploadResult", text)
        upload = self.gcs.uploads.get(query.get("uploadId"))
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise RefusalError(404, "NoSuchUpload", "The requested upload was not found.")
        if call.method == "PUT":
            sent = call.headers.get("x-goog-hash", "").removeprefix("crc32c=")
            if self.gcs.verifies and sent and sent != crc32c(call.body):
                raise RefusalError(
                    400, "BadDigest", "The CRC32C you specified did not match what we received."
                )
            etag = f'"{uuid.uuid4().hex}"'
            upload.parts[int(query["partNumber"])] = (etag, call.body)
            headers = {"ETag": etag, "x-goog-hash": f"crc32c={crc32c(call.body)}"}
            return 200, b"", "text/html", headers
        if call.method == "DELETE":
            del self.gcs.uploads[query["uploadId"]]
            return 204, b""
        return self._complete(call, upload)

    def _complete(self, call, upload):
        listed = [
            (int(part.findtext("PartNumber")), part.findtext("ETag")) for part in ET.fromstring(call.body)
        ]
        if listed != sorted(set(listed)):
            raise RefusalError(400, "InvalidPartOrder")
        if any(upload.parts.get(number, ("", b""))[0] != etag for number, etag in listed):
            raise RefusalError(400, "InvalidPart")
        parts = [upload.parts[number][1] for number, _ in listed]
        if any(len(part) < self.gcs.smallest_part for part in parts[:-1]):
            raise RefusalError(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum.")
        self.gcs.store(upload.bucket, upload.key, b"".join(parts))
        del self.gcs.uploads[call.query["uploadId"]]
        return self._xml_answer("CompleteMultipartUploadResult", f"<Key>{escape(upload.key)}</Key>")

    def _list_uploads(self, query, bucket):
        marker = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        found = sorted(
            (upload.key, upload_id)
            for upload_id, upload in self.gcs.uploads.items()
            if upload.bucket == bucket and upload.key.startswith(query.get("prefix", ""))
        )
        found = [entry for entry in found if entry > marker]
        page = found[: min(int(query.get("max-uploads", 1000)), 1000)]
        text = f"<IsTruncated>{str(len(page) < len(found)).lower()}</IsTruncated>"
        if len(page) < len(found):
            text += f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>"
            text += f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
        for key, upload_id in page:
            began = datetime.fromtimestamp(self.gcs.uploads[upload_id].began, UTC)
            text += (
                f"<Upload><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>"
                f"<Initiated>{began.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}</Initiated></Upload>"
            )
        return self._xml_answer("ListMultipartUploadsResult", text)

    def _xml_answer(self, name, text):
        namespace = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return 200, f"<?xml version='1.0'?><{name} {namespace}>{text}</{name}>".encode(), "application/xml"
