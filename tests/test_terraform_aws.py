"""``terraform/aws``: valid, as its own tests say, and once applied a bucket that a run lives in under exactly the rights it needs.

Applying takes a minute, nearly all of it Terraform's wait for the rules of the lifecycle: it goes on in the background while the
tests that come first run. That is why they stand in this order and on one worker.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass

import boto3
import pytest
import torch
from policy_gate import Call, PolicyGate, Rights, allows, denies, without
from terraform_tool import MissingError, Terraform, copy

import objckpt
from objckpt.cli import main
from objckpt.errors import CorruptCheckpointError, StorePermissionError
from objckpt.retention import abort_uploads
from objckpt.store import open_store
from objckpt.testing.servers.child import LOOPBACK, ChildServer, NotReadyError

pytestmark = pytest.mark.xdist_group("terraform")

REGION = "us-east-1"
PREFIX = "team/runs"
RUN = "llama-7b"

#: A root that uses the module as its users do, on moto.
ROOT = """
terraform {
  required_version = ">= 1.7"
  required_providers {
    aws = {
      source = "hashicorp/aws"
    }
  }
}

variable "endpoint" {
  type = string
}

variable "bucket" {
  type = string
}

variable "prefix" {
  type = string
}

variable "run" {
  type = string
}

provider "aws" {
  region                      = "us-east-1"
  access_key                  = "test"
  secret_key                  = "test"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true

  endpoints {
    ec2 = var.endpoint
    iam = var.endpoint
    kms = var.endpoint
    s3  = var.endpoint
    sts = var.endpoint
  }
}

module "checkpoints" {
  source     = "../aws"
  bucket     = var.bucket
  prefix     = var.prefix
  checkpoint = { run = var.run, keep = 2 }
}

output "checkpoints" {
  value = module.checkpoints
}
"""

#: Both examples under one root.
EXAMPLES = """
module "minimal" {
  source = "../aws/examples/minimal"
}

module "complete" {
  source            = "../aws/examples/complete"
  kms_key_arn       = "arn:aws:kms:eu-west-1:123456789012:key/0d3f"
  oidc_provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/AB12"
  vpc_id            = "vpc-1"
  route_table_ids   = ["rtb-1"]
}
"""


class MotoProcess(ChildServer):
    """moto in a process of its own: one in this process shares its state with every other test's."""

    title = "moto"

    def _command(self, directory, ports):
        return [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(ports["http"])]

    def _try(self):
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                self.endpoint_url, timeout=5
            ).close()
        except urllib.error.URLError as error:
            raise NotReadyError(str(error)) from error


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A copy of ``terraform/``; skips, and says so, where Terraform is missing."""
    folder = copy(tmp_path_factory.mktemp("terraform") / "terraform")
    for name, text in {"moto": ROOT, "examples": EXAMPLES}.items():
        (folder / name).mkdir()
        (folder / name / "main.tf").write_text(text)
    try:
        Terraform(folder / "moto").init()
    except MissingError as error:
        pytest.skip(f"Terraform cannot run here: {error}")
    return folder


@dataclass
class Applying:
    """The module on its way to moto."""

    terraform: Terraform
    arguments: list
    process: object
    log: object

    def state(self):
        """What Terraform knows once it is through."""
        code = self.process.wait(250)
        assert code == 0, f"terraform apply ended with {code}:\n{self.log.read_text()}"
        return self.terraform.show()["values"]


@pytest.fixture(scope="module")
def bucket():
    return f"objckpt-{uuid.uuid4().hex[:16]}"


@pytest.fixture(scope="module")
def moto():
    with MotoProcess() as server:
        yield server
        server.kill()  # SIGTERM it takes 10 s to obey


@pytest.fixture(scope="module", autouse=True)
def applying(work, moto, bucket):
    terraform = Terraform(work / "moto")
    given = {"endpoint": moto.endpoint_url, "bucket": bucket, "prefix": PREFIX, "run": RUN}
    arguments = [f"-var={name}={value}" for name, value in given.items()]
    log = work / "apply.log"
    process = terraform.start("apply", "-auto-approve", *arguments, log=log)
    yield Applying(terraform, arguments, process, log)
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def state(applying):
    return applying.state()


@pytest.fixture(scope="module")
def outputs(state):
    return state["outputs"]["checkpoints"]["value"]


@pytest.fixture(scope="module")
def policies(state):
    """The policies as they were applied, parsed, by address."""
    (module,) = state["root_module"]["child_modules"]
    return {
        resource["address"].removeprefix("module.checkpoints."): json.loads(resource["values"]["policy"])
        for resource in module["resources"]
        if resource["type"] in {"aws_iam_role_policy", "aws_s3_bucket_policy", "aws_kms_key"}
    }


@pytest.fixture(scope="module")
def rights(policies, outputs):
    def of(role):
        identity = policies[f'aws_iam_role_policy.this["{role}"]']
        return Rights(identity, policies["aws_s3_bucket_policy.this"], outputs["kms_key_arn"], REGION)

    return of


def actions_of(policy):
    return {action for statement in policy["Statement"] for action in statement["Action"]}


class Job:
    """A model whose shard (12 MiB) is uploaded in parts."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(1024, 3 << 10)
        self.state = {"model": self.model, "seen": 0}

    def save(self, checkpointer, step):
        with torch.no_grad():
            self.model.weight.add_(1)
        self.state["seen"] = step
        checkpointer.save(step, self.state).result(60)

    def same(self, other):
        return self.state["seen"] == other.state["seen"] and torch.equal(
            self.model.weight, other.model.weight
        )


@pytest.fixture
def node(outputs, tmp_path, monkeypatch):
    """A node with the ``objckpt.toml`` that Terraform made: a function that sends it to an S3 endpoint with these credentials."""
    (tmp_path / "objckpt.toml").write_text(outputs["objckpt_toml"])
    monkeypatch.chdir(tmp_path)

    def go_to(endpoint, key="test", secret="test"):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        return endpoint

    return go_to


def train(tmp_path, steps, **keywords):
    """Save each step, then restore on another node: one with nothing in its cache."""
    job, fresh = Job(0), Job(1)
    tuning = objckpt.Tuning(part_size=5 << 20)
    with objckpt.Checkpointer(cache=tmp_path / "node-1", tuning=tuning, **keywords) as checkpointer:
        assert checkpointer.restore(job.state) is None
        for step in steps:
            job.save(checkpointer, step)
    with objckpt.Checkpointer(cache=tmp_path / "node-2", tuning=tuning, **keywords) as checkpointer:
        assert checkpointer.restore(fresh.state).step == steps[-1]
    assert fresh.same(job)


# ------------------------------------------------------------------ while it is applied


def test_the_examples_are_valid(work):
    """Both in one go, since each start of the provider costs seconds; the module is a part of each."""
    assert "Success! The configuration is valid." in Terraform(work / "examples").init()("validate")


def test_the_modules_own_tests_pass(work):
    said = Terraform(work / "aws").init()("test")
    runs = sum(path.read_text().count('\nrun "') for path in (work / "aws/tests").glob("*.tftest.hcl"))
    assert f"Success! {runs} passed, 0 failed." in said


def test_the_gate_decides_as_iam_does():
    """Or what it lets through would prove nothing."""
    bucket, key = "arn:aws:s3:::b", "arn:aws:s3:::b/team/runs/x"
    policy = {
        "Statement": [
            {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::b/team/*"},
            {
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": bucket,
                "Condition": {"StringLike": {"s3:prefix": ["team/*"]}},
            },
        ]
    }
    nothing = {"Statement": []}
    plain = {"Bool": {"aws:SecureTransport": "false"}}
    tls = {"Statement": [{"Effect": "Deny", "Action": "s3:*", "Resource": f"{bucket}/*", "Condition": plain}]}
    assert allows(policy, nothing, Call("s3:GetObject", key))
    assert not allows(policy, nothing, Call("s3:PutObject", key))
    assert not allows(policy, nothing, Call("s3:GetObject", "arn:aws:s3:::b/teams/x"))
    assert allows(policy, nothing, Call("s3:ListBucket", bucket, {"s3:prefix": "team/runs/"}))
    assert not allows(policy, nothing, Call("s3:ListBucket", bucket, {"s3:prefix": "other/"}))
    assert not allows(policy, nothing, Call("s3:ListBucket", bucket)), "an absent key satisfies no condition"
    assert not allows(policy, tls, Call("s3:GetObject", key, {"aws:SecureTransport": "false"}))
    assert allows(policy, tls, Call("s3:GetObject", key, {"aws:SecureTransport": "true"}))
    with pytest.raises(KeyError):
        denies({"Statement": [{**policy["Statement"][1], "Effect": "Deny", "Condition": {"Odd": {"a": "b"}}}]},
               Call("s3:ListBucket", bucket))  # fmt: skip


# ------------------------------------------------------------------ once it is


def test_a_second_plan_changes_nothing(applying, state):
    assert "No changes." in applying.terraform("plan", "-detailed-exitcode", *applying.arguments)


def test_a_run_lives_in_the_bucket_under_the_trainers_rights(moto, bucket, node, rights, tmp_path):
    """Saved, retired and restored with the ``objckpt.toml`` that Terraform made; without it one would not know where to."""
    client = boto3.client(
        "s3",
        endpoint_url=moto.endpoint_url,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    # moto takes a Deny with a condition for one without, and would refuse everything. The gate obeys the policy in its stead.
    client.delete_bucket_policy(Bucket=bucket)
    with PolicyGate(moto.endpoint_url, rights("trainer")) as gate:
        node(gate.endpoint_url)
        train(tmp_path, [10, 20, 30])
        assert gate.actions() >= {"s3:PutObject", "s3:GetObject", "s3:ListBucket"}
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys
    assert all(key.startswith(f"{PREFIX}/{RUN}/") for key in keys)
    for key in keys:
        head = client.head_object(Bucket=bucket, Key=key)
        assert head["ServerSideEncryption"] == "aws:kms", (
            f"{key} is not encrypted, though nobody had to ask for it"
        )
    for key in keys:
        client.delete_object(Bucket=bucket, Key=key)


@pytest.fixture(scope="module")
def seen(weed, bucket, rights, outputs, tmp_path_factory):
    """What trainer and gc asked a real server for, each under its own policy."""
    weed.client().create_bucket(Bucket=bucket)
    uri = f"s3://{bucket}/{PREFIX}/{RUN}"
    folder = tmp_path_factory.mktemp("seen")

    def options(gate):
        return {**weed.storage_options, "endpoint_url": gate.endpoint_url}

    with PolicyGate(weed.endpoint_url, rights("trainer")) as trainer:
        train(folder, [10, 20, 30, 40], uri=uri, keep=2, storage_options=options(trainer))
        store = open_store(uri, part_size=5 << 20, **options(trainer))
        with pytest.raises(CorruptCheckpointError):  # its upload is aborted
            store.put("data/00/changed", bytes(12 << 20), crc64=1)
    # As a trainer leaves it that was killed while it uploaded.
    weed.client().create_multipart_upload(Bucket=bucket, Key=f"{PREFIX}/{RUN}/data/00/unfinished")
    with PolicyGate(weed.endpoint_url, rights("gc")) as gc:
        said = [part for name, value in options(gc).items() for part in ("-o", f"{name}={value}")]
        assert main(["gc", uri, "--grace", "0", *said]) == 0
        gc_store = open_store(uri, **options(gc))
        assert abort_uploads(gc_store, life=-5) == 1
    kept = [o.key for o in open_store(uri, **weed.storage_options).list("data/")]
    return trainer, gc, kept


def test_the_trainer_has_the_rights_that_it_uses_and_no_other(seen, rights):
    trainer, _, _ = seen
    assert trainer.actions() - {"s3:DeleteObject"} == actions_of(rights("trainer").identity)


def test_the_trainer_is_refused_to_delete_and_nothing_else(seen):
    trainer, _, _ = seen
    assert {call.action for call in trainer.refused} == {"s3:DeleteObject"}


def test_gc_has_the_rights_that_it_uses_and_no_other(seen, rights):
    _, gc, kept = seen
    assert gc.actions() == actions_of(rights("gc").identity)
    assert gc.refused == []
    assert 0 < len(kept) < 4, "gc deletes what was retired, and that alone"


def test_roles_reach_neither_other_prefixes_nor_the_other_roles_verbs(weed, bucket, seen, rights):
    def store(gate, folder):
        return open_store(
            f"s3://{bucket}/{folder}", **weed.storage_options | {"endpoint_url": gate.endpoint_url}
        )

    for role in ("trainer", "gc"):
        with PolicyGate(weed.endpoint_url, rights(role)) as gate:
            for refused in (
                lambda other: list(other.list("")),
                lambda other: other.head("x"),
                lambda other: other.put("x", b"x"),
                lambda other: other.delete(["x"]),
            ):
                with pytest.raises(StorePermissionError):
                    refused(store(gate, "team/runs-of-others"))
    with PolicyGate(weed.endpoint_url, rights("gc")) as gate, pytest.raises(StorePermissionError):
        store(gate, f"{PREFIX}/{RUN}").put("data/00/x", b"x")


def test_the_bucket_refuses_to_overwrite_exactly_what_is_created(seen, rights):
    """For each upload: had it come without its condition, it would have been refused if and only if objckpt sends one."""
    trainer, _, _ = seen
    policy = rights("trainer").bucket_policy
    puts = [call for call in trainer.asked if call.action == "s3:PutObject"]
    kinds = set()
    for call in puts:
        assert not denies(policy, call), call
        created = "s3:if-none-match" in call.context
        assert denies(policy, without(call, "s3:if-none-match")) == created, call
        kinds.add(
            (
                call.resource.removeprefix(f"{call.resource.partition(RUN)[0]}{RUN}/").partition("/")[0],
                created,
            )
        )
    assert kinds == {("manifest", True), ("index", True), ("records", True), ("probe", True), ("data", False)}


def test_the_bucket_refuses_plain_http_and_old_tls(seen, rights):
    trainer, gc, _ = seen
    policy = rights("trainer").bucket_policy
    calls = [call for call in trainer.asked + gc.asked if call.action.startswith("s3:")]
    assert calls
    for call in calls:
        assert denies(
            policy, Call(call.action, call.resource, call.context | {"aws:SecureTransport": "false"})
        )
        assert denies(policy, Call(call.action, call.resource, call.context | {"s3:TlsVersion": "1.1"}))


def test_it_is_destroyed_when_empty(applying, state, moto):
    said = applying.terraform("destroy", "-auto-approve", "-refresh=false", *applying.arguments)
    assert "Destroy complete!" in said
    assert not applying.terraform.show().get("values")
