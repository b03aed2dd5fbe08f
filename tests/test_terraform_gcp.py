"""``terraform/gcp``, as far as it can be known without Google's provider: names, required arguments, rights, what variables take."""

from __future__ import annotations

import json
import re

import pytest
from terraform_docs import TERRAFORM, entries, parsed, resources
from terraform_tool import MissingError, Terraform

from objckpt import config
from objckpt.manifest import KeepLast

MODULE = TERRAFORM / "gcp"
SCHEMA = json.loads((MODULE / "tests/schema.json").read_text())
META = {"count", "for_each", "depends_on", "lifecycle", "provider"}


@pytest.fixture(scope="module")
def document():
    return parsed(MODULE)


def camel(name):
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)


def faults(body, known, where):
    """What the schema does not know in a block, and what it requires and misses. Blocks are lists, dynamic ones under ``dynamic``."""
    given = {}
    for name, value in body.items():
        if name == "dynamic":
            for block in value:
                for inner, said in block.items():
                    given[camel(inner)] = said["content"]
        else:
            given[camel(name)] = value
    for name, value in given.items():
        if name not in known:
            yield f"{where} knows no {name}"
        elif "block" in known[name] and isinstance(value, list):
            for block in value:
                yield from faults(block, known[name]["block"], f"{where}.{name}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{where}.{name} is no block"
    yield from (
        f"{where} misses {name}" for name, said in known.items() if said["required"] and name not in given
    )


@pytest.mark.parametrize("kind", ["resource", "data"])
def test_every_argument_is_one_that_the_provider_knows(document, kind):
    found = resources(document, kind)
    assert found
    for of_type, name, body in found:
        known = SCHEMA["types"][f"{kind} {of_type}"]["arguments"]
        own = {argument: value for argument, value in body.items() if argument not in META}
        assert not list(faults(own, known, f"{of_type}.{name}"))


def test_the_lint_sees_a_wrong_name_a_missing_one_and_a_wrong_block():
    known = SCHEMA["types"]["resource google_storage_bucket"]["arguments"]
    body = {"name": "a", "softdelete_policy": [{}], "lifecycle_rule": [{"action": [{"kind": "Delete"}]}]}
    assert sorted(faults(body, known, "b")) == [
        "b knows no softdeletePolicy",
        "b misses location",
        "b.lifecycleRule misses condition",
        "b.lifecycleRule.action knows no kind",
        "b.lifecycleRule.action misses type",
    ]


def test_every_attribute_that_is_read_is_one_that_the_provider_has(document):
    text = "\n".join(path.read_text() for path in sorted(MODULE.glob("*.tf")))
    own = {f"{of_type}.{name}" for of_type, name, _ in resources(document, "resource")}
    read = re.findall(r"(data\.)?(google_\w+)\.(\w+)(?:\[[^]]+\])?\.(\w+)", text)
    assert len(read) >= 8
    for data, of_type, name, attribute in read:
        known = SCHEMA["types"][f"{'data' if data else 'resource'} {of_type}"]["attributes"]
        assert camel(attribute) in known, f"{of_type} has no {attribute}"
        assert data or f"{of_type}.{name}" in own


def test_the_bucket_is_private_and_nothing_in_it_ages(document):
    ((_, _, bucket),) = [
        found for found in resources(document, "resource") if found[0] == "google_storage_bucket"
    ]
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["public_access_prevention"] == "enforced"
    assert bucket["force_destroy"] is False
    assert bucket["versioning"] == [{"enabled": False}]
    assert bucket["soft_delete_policy"] == [{"retention_duration_seconds": 0}]
    assert bucket["lifecycle_rule"] == [
        {"action": [{"type": "AbortIncompleteMultipartUpload"}], "condition": [{"age": 3}]}
    ]


def test_the_trainer_cannot_delete_and_gc_cannot_create(document):
    (locals_,) = (block for block in document["locals"] if "roles" in block)
    trainer, gc = (set(locals_["roles"][role]["permissions"]) for role in ("trainer", "gc"))
    assert trainer == {
        "storage.multipartUploads.abort",
        "storage.multipartUploads.create",
        "storage.objects.create",
        "storage.objects.get",
        "storage.objects.list",
    }
    assert gc == {
        "storage.multipartUploads.abort",
        "storage.objects.delete",
        "storage.objects.get",
        "storage.objects.list",
    }


# ------------------------------------------------------------------ what Terraform can evaluate without the provider


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """Plans a root of the module's own variables, its locals without resources and ``objckpt_toml``: returns the outputs."""
    try:
        Terraform.program()
    except MissingError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("gcp")
    (folder / "variables.tf").write_text((MODULE / "variables.tf").read_text())
    (toml,) = re.findall(
        r'^output "objckpt_toml" {.*?^}$', (MODULE / "outputs.tf").read_text(), re.DOTALL | re.MULTILINE
    )
    (locals_,) = re.findall(
        r"^locals {.*?^}$", (MODULE / "identity.tf").read_text(), re.DOTALL | re.MULTILINE
    )
    inside = 'output "inside" {\n  value = local.inside\n}\n'
    (folder / "main.tf").write_text(f"{locals_}\n{toml}\n{inside}")
    terraform = Terraform(folder)

    def run(*, codes=(0,), **variables):
        (folder / "given.tfvars.json").write_text(
            json.dumps(
                {
                    "project": "acme-training",
                    "bucket": "acme-checkpoints",
                    "location": "europe-west4",
                    **variables,
                }
            )
        )
        said = terraform("plan", "-out=plan", "-var-file=given.tfvars.json", codes=codes)
        if codes != (0,):
            return said
        planned = json.loads(terraform("show", "-json", "plan"))["planned_values"]["outputs"]
        return {name: output["value"] for name, output in planned.items()}

    return run


def loaded(toml, tmp_path, monkeypatch):
    (tmp_path / "objckpt.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    return config.load()


def test_the_file_for_a_node_is_one_that_objckpt_reads(evaluate, tmp_path, monkeypatch):
    said = loaded(evaluate()["objckpt_toml"], tmp_path, monkeypatch)
    assert said.uri == "gs://acme-checkpoints/main"
    assert said.storage_options == {"project": "acme-training"}
    checkpoint = {"run": "a/b", "cache": '/nvme "1"', "interval": 500, "keep": 3}
    said = loaded(evaluate(prefix="team/runs", checkpoint=checkpoint)["objckpt_toml"], tmp_path, monkeypatch)
    assert said.uri == "gs://acme-checkpoints/team/runs/a/b"
    assert (str(said.cache), said.interval, said.keep) == ('/nvme "1"', 500, (KeepLast(3),))


def test_the_condition_names_objects_and_lists_below_the_prefix(evaluate):
    assert evaluate(prefix="team/runs")["inside"] == (
        'resource.name.startsWith("projects/_/buckets/acme-checkpoints/objects/team/runs/")'
        ' || api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("team/runs/")'
    )


def test_good_values_are_taken(evaluate):
    pods = ["serviceAccount:acme-training.svc.id.goog[training/trainer]"]
    federated = ["principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/*"]
    key = "projects/acme-training/locations/europe-west4/keyRings/r/cryptoKeys/k"
    evaluate(prefix="a/b-c/d.e", name="acme-language", kms_key=key, trainer_users=pods, gc_users=federated)


def test_wrong_values_are_refused(evaluate):
    wrong = {
        "project": "Acme Training",
        "bucket": "Acme",
        "location": "",
        "prefix": "/runs",
        "checkpoint": {"keep": 1},
        "name": "Two Words",
        "kms_key": "checkpoints",
        "trainer_users": ["allUsers"],
        "gc_users": ["user:a@b.example"],
    }
    said = evaluate(codes=(1,), **wrong)
    for name, value in wrong.items():
        assert re.search(rf"│ var\.{name}\b", said), f"{name} took {value!r}"
    assert set(wrong) | {"labels"} == set(entries(parsed(MODULE), "variable"))
