"""What a user may say of encryption, storage class, payer and address, and that every request says it to the server."""

from __future__ import annotations

import base64
import contextlib

import boto3
import pytest
from s3_stores import COMPLETED, CREATED, one_reader_of_boto3s_files, store_at  # noqa: F401 # the fixture is for all tests here
from scripted_http import ScriptedServer, reply

from objckpt.errors import ConfigError, StorePermissionError
from objckpt.store import open_store
from objckpt.store.s3_headers import NOT_ON_EXPRESS, ON_ALL, ON_WRITES
from objckpt.store.s3_options import SMALLEST_PART, S3Options

KMS = "arn:aws:kms:us-east-1:123456789012:key/0000"
WRITTEN = {
    "ServerSideEncryption": "aws:kms",
    "SSEKMSKeyId": KMS,
    "BucketKeyEnabled": True,
    "StorageClass": "STANDARD_IA",
    "Tagging": "team=llm&run=7",
    "ACL": "bucket-owner-full-control",
}
ALWAYS = {"RequestPayer": "requester", "ExpectedBucketOwner": "123456789012"}
WRITE_HEADERS = {
    "x-amz-server-side-encryption": "aws:kms",
    "x-amz-server-side-encryption-aws-kms-key-id": KMS,
    "x-amz-server-side-encryption-bucket-key-enabled": "true",
    "x-amz-storage-class": "STANDARD_IA",
    "x-amz-tagging": "team=llm&run=7",
    "x-amz-acl": "bucket-owner-full-control",
}
ALL_HEADERS = {"x-amz-request-payer": "requester", "x-amz-expected-bucket-owner": "123456789012"}
DATA = bytes(range(256))
LISTED = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
UPLOADS = b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
DATE = "Tue, 01 Dec 2026 00:00:00 GMT"


def use_every_verb(store):
    store.put("k", DATA)
    assert store.create("k", DATA)
    store.put("k", bytes(SMALLEST_PART + 1))
    assert store.read("k", memoryview(bytearray(256))) == 256
    store.head("k")
    list(store.list(""))
    store.delete(["k"])
    store.abort_uploads("", 1)


STEPS = {
    "PUT": reply(200),
    "create": reply(200),
    "begin": CREATED,
    "part 1": reply(200),
    "part 2": reply(200),
    "complete": COMPLETED,
    "GET": reply(206, DATA, Content_Range="bytes 0-255/256"),
    "HEAD": reply(200, length=256, Last_Modified=DATE),
    "list": reply(200, LISTED),
    "delete": reply(200, b"<DeleteResult/>"),
    "uploads": reply(200, UPLOADS, Date=DATE),
}


def test_what_is_said_goes_with_every_request_that_takes_it():
    # The parts of an upload come in any order, and neither has more to say than the other.
    with ScriptedServer(*STEPS.values()) as server:
        use_every_verb(store_at(server, s3_additional_kwargs=WRITTEN | ALWAYS))
    said = {
        name: {header: value for header, value in headers.items() if header in WRITE_HEADERS | ALL_HEADERS}
        for name, (_, _, headers, _) in zip(STEPS, server.asked, strict=True)
    }
    makes_objects = {"PUT", "create", "begin"}
    assert said == {
        name: (WRITE_HEADERS | ALL_HEADERS if name in makes_objects else ALL_HEADERS) for name in STEPS
    }
    for _, _, headers, _ in server.asked:
        signed = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        assert {name for name in headers if name.startswith("x-amz-")} <= set(signed)


def test_nothing_is_said_unasked():
    with ScriptedServer(*STEPS.values()) as server:
        use_every_verb(store_at(server))
    for _, _, headers, _ in server.asked:
        assert not set(headers) & set(WRITE_HEADERS | ALL_HEADERS)


def test_the_headers_are_those_of_boto3s_own_description():
    """An independent oracle: the service model that botocore ships."""
    model = boto3.client("s3", region_name="us-east-1").meta.service_model

    def headers(operation):
        members = model.operation_model(operation).input_shape.members
        return {name: shape.serialization.get("name") for name, shape in members.items()}

    making = ["PutObject", "CreateMultipartUpload"]
    others = ["UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload", "ListMultipartUploads"]
    others += ["GetObject", "HeadObject", "ListObjectsV2", "DeleteObjects"]
    for operation in making:
        assert (ON_WRITES | ON_ALL).items() <= headers(operation).items()
    for operation in others:
        assert ON_ALL.items() <= headers(operation).items()
        assert not set(ON_WRITES) & set(headers(operation))
    assert set(ON_WRITES | ON_ALL) >= NOT_ON_EXPRESS


def test_requester_pays_is_the_short_form():
    options = S3Options.from_storage_options({"requester_pays": True})
    assert options.s3_additional_kwargs == {"RequestPayer": "requester"}
    assert not S3Options.from_storage_options({"requester_pays": False}).s3_additional_kwargs


@pytest.mark.parametrize(
    ("additional", "named"),
    [
        ({"ServerSideEncription": "aws:kms"}, "'ServerSideEncryption'"),
        ({"storage_class": "STANDARD"}, "'StorageClass'"),
        ({"SSECustomerKey": "hunter2"}, "SSEKMSKeyId"),
        ({"SSECustomerAlgorithm": "AES256"}, "each reader"),
        ({"StorageClass": "DEEP_ARCHIVE"}, "GLACIER_IR"),
        ({"StorageClass": 7}, "must be text"),
        ({"BucketKeyEnabled": "true", "ServerSideEncryption": "aws:kms"}, "True or False"),
        ({"SSEKMSKeyId": KMS}, "no effect without"),
        ({"SSEKMSKeyId": KMS, "ServerSideEncryption": "AES256"}, "no effect without"),
        ({"Tagging": "a=b\r\nx-amz-acl: public-read"}, "cannot stand in a header"),
        ({"Tagging": ""}, "cannot stand in a header"),
    ],
)
def test_what_cannot_be_said_is_refused_with_what_to_say_instead(additional, named):
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/run", s3_additional_kwargs=additional)
    assert named in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_who_sends_no_credentials_reads_only():
    with ScriptedServer(STEPS["GET"], STEPS["list"]) as server:
        store = store_at(server, key=None, secret=None, anon=True)
        assert store.read("k", memoryview(bytearray(256))) == 256
        list(store.list(""))
        for write in (
            lambda: store.put("k", DATA),
            lambda: store.put("k", bytes(SMALLEST_PART + 1)),
            lambda: store.create("k", DATA),
            lambda: store.delete(["k"]),
            lambda: store.abort_uploads("", 1),
        ):
            with pytest.raises(StorePermissionError, match="anon=True sends no credentials"):
                write()
    assert server.methods() == ["GET", "GET"]


def test_a_bucket_in_the_host_name_is_asked_so_by_both_ways():
    with ScriptedServer(STEPS["PUT"], STEPS["list"]) as server:
        config = {"proxies": {"http": server.url}, "s3": {"addressing_style": "virtual"}}
        store = store_at(server, endpoint_url="http://store.invalid:8333", config_kwargs=config)
        store.put("k", DATA)
        list(store.list(""))
    (_, put, headers, _), (_, listed, _, _) = server.asked
    assert put == "http://bucket.store.invalid:8333/run/k"
    assert headers["host"] == "bucket.store.invalid:8333"
    assert listed.startswith("http://bucket.store.invalid:8333/?list-type=2")


def test_plain_http_and_region_are_taken():
    with ScriptedServer(STEPS["PUT"], STEPS["list"]) as server:
        region = {"region_name": "eu-west-1"}
        store = store_at(
            server,
            endpoint_url=None,
            use_ssl=False,
            client_kwargs=region,
            config_kwargs={"proxies": {"http": server.url}},
        )
        store.put("k", DATA)
        list(store.list(""))
    for _, target, headers, _ in server.asked:
        assert target.startswith("http://bucket.s3.eu-west-1.amazonaws.com/")
        assert "/eu-west-1/s3/aws4_request" in headers["authorization"]


@contextlib.contextmanager
def tunnel_to(server):
    """A proxy that tunnels: it takes CONNECT and hands bytes on to ``server``."""
    import socket
    import threading

    targets, sockets = [], []

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve(listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(1 << 16)
            targets.append(head.decode())
            upstream = socket.create_connection(("127.0.0.1", server.port))
            sockets.extend((client, upstream))
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            for pair in ((client, upstream), (upstream, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://user:pass@127.0.0.1:{listener.getsockname()[1]}", targets
        listener.shutdown(socket.SHUT_RDWR)
    for entry in sockets:
        entry.close()


def test_tls_goes_through_a_proxy_that_sees_nothing_of_it(tmp_path):
    from scripted_http import self_signed

    cert, tls = self_signed(tmp_path)
    with (
        ScriptedServer(STEPS["PUT"], STEPS["list"], tls=tls) as server,
        tunnel_to(server) as (proxy, targets),
    ):
        store = store_at(server, client_kwargs={"verify": cert}, config_kwargs={"proxies": {"https": proxy}})
        store.put("k", DATA)
        list(store.list(""))
        assert len(targets) == 2
        for head in targets:
            assert head.startswith(f"CONNECT 127.0.0.1:{server.port} ")
            assert f"Basic {base64.b64encode(b'user:pass').decode()}" in head
    assert server.asked[0][1] == "/bucket/run/k"
