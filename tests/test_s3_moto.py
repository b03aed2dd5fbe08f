"""S3's errors and options as moto plays them, in this process: refusals with AWS's codes, what became of the headers, roles."""

from __future__ import annotations

import uuid

import pytest
from s3_stores import one_reader_of_boto3s_files  # noqa: F401 # the fixture is for all tests here

from objckpt.commit import Run
from objckpt.errors import StoreNotFoundError, StorePermissionError
from objckpt.retention import retain
from objckpt.store import open_store, read_all
from objckpt.store.s3_options import SMALLEST_PART
from objckpt.testing.servers import Moto

KMS = "arn:aws:kms:us-east-1:123456789012:key/0000"
BIG = bytes(SMALLEST_PART) + b"tail"


@pytest.fixture(scope="module")
def moto():
    with Moto() as server:
        yield server


@pytest.fixture
def uri(moto):
    return f"s3://{moto.bucket}/{uuid.uuid4().hex}"


def full(uri, key):
    return uri.split("/", 3)[3] + "/" + key


@pytest.mark.parametrize("way", ["storage_options", "as_aws"])
def test_encryption_class_and_tags_arrive_with_shards_records_and_manifests(moto, uri, way):
    """All objects of a run go through ``put`` (in one request, or in parts) and ``create``."""
    additional = {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": KMS,
        "StorageClass": "STANDARD_IA",
        "Tagging": "team=llm&run=7",
    }
    store = open_store(uri, **getattr(moto, way), s3_additional_kwargs=additional, part_size=SMALLEST_PART)
    store.put("data/00/small", b"x")
    store.put("data/00/large", BIG)
    assert store.create("manifest/1", b"{}") is True
    for key in ("data/00/small", "data/00/large", "manifest/1"):
        place = {"Bucket": moto.bucket, "Key": full(uri, key)}
        head = moto.client().head_object(**place)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", KMS)
        assert head["StorageClass"] == "STANDARD_IA"
        tags = moto.client().get_object_tagging(**place)["TagSet"]
        assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "llm", "run": "7"}
    assert read_all(store, "data/00/large") == BIG


def test_a_run_is_proven_on_what_takes_itself_for_aws(moto, uri):
    store = open_store(uri, **moto.as_aws)
    Run(store, retain=retain).prove()
    assert list(store.list("")) == []
    assert store._session.is_aws


def test_who_may_do_less_is_told_what(moto, uri):
    open_store(uri, **moto.storage_options).put("k", b"x")
    reader = open_store(uri, **moto.storage_options | moto.make_user(["s3:GetObject", "s3:ListBucket"]))
    writer = open_store(
        uri, **moto.storage_options | moto.make_user(["s3:PutObject", "s3:GetObject", "s3:ListBucket"])
    )
    with moto.enforcing():
        assert read_all(reader, "k") == b"x"
        assert [info.key for info in reader.list("")] == ["k"]
        for refused in (
            lambda: reader.put("k2", b"x"),
            lambda: reader.create("k2", b"x"),
            lambda: reader.put("k2", BIG),
        ):
            with pytest.raises(StorePermissionError, match="let the policy"):
                refused()
        # A trainer that may not delete proves the store all the same; gc deletes the probe.
        Run(writer, retain=retain).prove()
        assert [info.key.split("/")[0] for info in writer.list("")] == ["k", "probe"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"key": "AKIANOBODY"}, "does not know this access key"),
        ({"secret": "not-the-secret"}, "does not fit the access key"),
    ],
)
def test_wrong_credentials_are_told_apart(moto, uri, wrong, told):
    user = moto.make_user(["*"])
    store = open_store(uri, **moto.storage_options | user | wrong)
    with moto.enforcing():
        for verb in (
            lambda: store.put("k", b"x"),
            lambda: list(store.list("")),
            lambda: store.create("k", b"x"),
        ):
            with pytest.raises(StorePermissionError, match=told) as caught:
                verb()
            assert user["secret"] not in str(caught.value)


def test_a_missing_bucket_is_told(moto):
    store = open_store("s3://objckpt-no-such-bucket/run", **moto.as_aws)
    for verb in (lambda: store.put("k", b"x"), lambda: list(store.list("")), lambda: store.head("k")):
        with pytest.raises(StoreNotFoundError, match="no bucket 'objckpt-no-such-bucket'"):
            verb()


@pytest.fixture
def assumed(moto, uri, tmp_path, monkeypatch):
    """A profile that assumes a role through STS, by boto3's own chain; and the keys that S3 was asked with."""
    config = tmp_path / "config"
    role = "arn:aws:iam::123456789012:role/trainer"
    config.write_text(
        f"[profile base]\naws_access_key_id = base-key\naws_secret_access_key = x\n"
        f"[profile trainer]\nrole_arn = {role}\nsource_profile = base\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.endpoint_url)
    return open_store(uri, profile="trainer", endpoint_url=moto.endpoint_url)


def test_a_role_is_assumed_through_the_profile(moto, assumed):
    made = moto.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")["Role"]
    assert made["RoleName"] == "trainer"
    assumed.put("k", b"x")
    credentials = assumed._session._credentials
    assert credentials.method == "assume-role"
    assert read_all(assumed, "k") == b"x"
    used = assumed._session._used_credentials
    assert used.access_key.startswith("ASIA")
    assert used.token


def test_requester_pays_goes_along(moto, uri, monkeypatch):
    from objckpt.store.http import ConnectionPool

    said = []
    exchange = ConnectionPool.exchange

    def seen(self, request):
        said.append({name.lower(): value for name, value in request.headers.items()})
        return exchange(self, request)

    monkeypatch.setattr(ConnectionPool, "exchange", seen)
    store = open_store(uri, **moto.as_aws, requester_pays=True)
    store.put("k", b"x")
    assert read_all(store, "k") == b"x"
    assert [headers["x-amz-request-payer"] for headers in said] == ["requester"] * len(said)
    assert len(said) == 3
