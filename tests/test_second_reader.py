"""FORMAT.md is enough to write another reader: this one has a bucket listing, jq and safetensors, and nothing of objckpt.

It gets every tensor of the newest and of an older checkpoint out of a bucket that the real Checkpointer wrote. Below ``SecondReader`` is
the only part that may use objckpt. Where jq is not installed, the same questions are asked of Python's json; both answers are compared
where it is.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from awscrt.checksums import crc64nvme
from safetensors.torch import load as load_safetensors

JQ = shutil.which("jq")
BLOCK = 4 << 20


def crc64_table() -> list[int]:
    """The table of FORMAT.md's parameters: reflected, bit by bit."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
        table.append(crc)
    return table


TABLE = crc64_table()


@functools.lru_cache(maxsize=16)  # a second for a block, and several tests read the same ones
def crc64(data: bytes) -> str:
    table, crc = TABLE, 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc = table[crc & 0xFF ^ byte] ^ crc >> 8
    return f"{crc ^ 0xFFFFFFFFFFFFFFFF:016x}"


def ask(document: bytes, program: str, plain: Callable[[Any], Any], jq: str | None = JQ) -> Any:
    """What jq's ``program`` makes of a document; ``plain`` is the same in Python, for machines without jq."""
    if jq is None:
        return plain(json.loads(document))
    done = subprocess.run([jq, "-c", program], input=document, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


class DamagedError(Exception):
    pass


@dataclass
class SecondReader:
    """``keys`` lists a prefix, ``get`` returns bytes (begin, end) of an object or all of it. ``requests`` counts both."""

    keys: Callable[[str], list[str]]
    get: Callable[[str, tuple[int, int] | None], bytes]
    jq: str | None = JQ
    requests: int = 0

    def newest(self) -> bytes:
        """Requests 1 and 2: the content of the version with the highest number."""
        self.requests += 2
        found = [k for k in self.keys("manifest/") if re.fullmatch(r"manifest/\d{20}\.json", k)]
        return self.get(max(found, key=lambda k: int(k[9:29])), None)

    def entries(self, version: bytes) -> list[dict[str, Any]]:
        """Every checkpoint, its index's reference, and whether it is the head."""
        return ask(
            version,
            '.head as $h | [.kept[] | {step, index, head: ({attempt, step} == $h), ok: (.index.key | startswith("index/"))}]',
            lambda v: [
                {
                    "step": e["step"],
                    "index": e["index"],
                    "head": {"attempt": e["attempt"], "step": e["step"]} == v["head"],
                    "ok": e["index"]["key"].startswith("index/"),
                }
                for e in v["kept"]
            ],
            self.jq,
        )

    def referenced(self, reference: dict[str, Any]) -> bytes:
        self.requests += 1
        data = self.get(reference["key"], None)
        if len(data) != reference["size"] or crc64(data) != reference["crc64"]:
            raise DamagedError(reference["key"])
        return data

    def records(self, index_reference: dict[str, Any]) -> list[dict[str, Any]]:
        """Objects and pieces of every rank."""
        index = self.referenced(index_reference)
        found = []
        for reference in ask(index, ".records", lambda i: i["records"], self.jq):
            found += ask(
                self.referenced(reference),
                '(if .format == "objckpt.group" then .records else [.] end) | map({rank, objects, pieces})',
                lambda r: [
                    {"rank": x["rank"], "objects": x["objects"], "pieces": x["pieces"]}
                    for x in (r["records"] if r["format"] == "objckpt.group" else [r])
                ],
                self.jq,
            )
        return found

    def tensor_bytes(self, record: dict[str, Any], piece: dict[str, Any]) -> bytes:
        """One tensor by ranged requests for the blocks that it touches, each verified."""
        obj = record["objects"][piece["object"]]
        begin, end = piece["range"]
        size, parts = obj["block_size"], []
        for number in range(begin // size, -(-end // size)):
            first, last = number * size, min((number + 1) * size, obj["size"])
            block = self.get(obj["key"], (first, last))
            if crc64(block) != obj["crc64"][number]:
                raise DamagedError(f"{obj['key']}, block {number}")
            parts.append(block[max(begin - first, 0) : end - first])
        return b"".join(parts)

    def tensors(self, index_reference: dict[str, Any]) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint, from whole shards, each block verified, by safetensors."""
        found = {}
        for record in self.records(index_reference):
            shards = {}
            for obj in record["objects"]:
                data, size = self.get(obj["key"], None), obj["block_size"]
                if [crc64(data[at : at + size]) for at in range(0, len(data), size)] != obj["crc64"]:
                    raise DamagedError(obj["key"])
                shards[obj["key"]] = load_safetensors(data)
            for piece in record["pieces"]:
                assert piece["shape"] == piece["global_shape"], "version 1 writers store tensors whole"
                tensor = shards[record["objects"][piece["object"]]["key"]][piece["name"]]
                if piece["dtype"] == "complex128":
                    tensor = torch.view_as_complex(tensor)
                assert str(tensor.dtype) == f"torch.{piece['dtype']}"
                assert list(tensor.shape) == piece["shape"]
                found[piece["name"]] = tensor
        return found


def bucket_reader(weed, bucket_uri: str, jq: str | None = JQ) -> SecondReader:
    """The reader over plain boto3."""
    client = boto3.client(
        "s3",
        endpoint_url=weed.endpoint_url,
        aws_access_key_id=weed.readonly_key,
        aws_secret_access_key=weed.readonly_secret,
        region_name="us-east-1",
    )
    prefix = bucket_uri.removeprefix(f"s3://{weed.bucket}/") + "/"

    def keys(below: str) -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=weed.bucket, Prefix=prefix + below)
        return [o["Key"].removeprefix(prefix) for page in pages for o in page.get("Contents", [])]

    def get(key: str, span: tuple[int, int] | None) -> bytes:
        given = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        return client.get_object(Bucket=weed.bucket, Key=prefix + key, **given)["Body"].read()

    return SecondReader(keys, get, jq)


# ------------------------------------------------------------------ a run to read


def bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype), list(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


class Loader:
    """An object that is one rank's own."""

    def __init__(self) -> None:
        self.order = torch.arange(7)

    def state_dict(self):
        return {"order": self.order.clone()}

    def load_state_dict(self, state):
        self.order = state["order"]


def odd_tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, and the shapes at which readers stumble."""
    kinds = [
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    ]  # fmt: skip
    found = {kind: torch.arange(3).to(getattr(torch, kind)) for kind in kinds}
    found["float8_e4m3fn"] = torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)
    return found | {
        "bool": torch.tensor([[True, False]]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "größe.a\\b": torch.tensor([float("nan"), -0.0]),
    }


@pytest.fixture(scope="module")
def written(weed, tmp_path_factory):
    """(URI, tensors by name of each step): two checkpoints, by the real Checkpointer and its uploader."""
    from objckpt import Checkpointer, PerRank

    uri = f"s3://{weed.bucket}/second-reader"
    model = torch.nn.Linear(3, 2)
    model.register_buffer("big", torch.arange(BLOCK // 4 + 1000, dtype=torch.float32))  # more than a block
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = Loader()
    odd = odd_tensors()
    state = {"model": model, "optim": optim, "loader": PerRank(loader), "odd": odd}
    wanted = {}
    with Checkpointer(
        uri, cache=tmp_path_factory.mktemp("cache"), keep=3, rng=False, storage_options=weed.storage_options
    ) as ckpt:
        assert ckpt.restore(state) is None
        for step in (5, 10):
            optim.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optim.step()
            loader.order = loader.order.roll(1)
            ckpt.save(step, state, metadata={"step": step})
            expected = {f"model.{k}": v for k, v in model.state_dict().items()}
            for name, parameter in model.named_parameters():
                expected |= {f"optim.model.{name}.{k}": v for k, v in optim.state[parameter].items()}
            expected |= {
                f"odd.{k.replace(chr(92), chr(92) * 2).replace('.', chr(92) + '.')}": v
                for k, v in odd.items()
            }
            expected["rank-00000/loader.order"] = loader.order
            wanted[step] = {k: bits(v) for k, v in expected.items()}
        ckpt.wait()
    return uri, wanted


# ------------------------------------------------------------------ what is proved


def test_the_crc_of_the_document_is_the_one_of_objckpt():
    assert crc64(b"123456789") == "ae8b14860a799888"
    for data in (b"", b"\0", bytes(range(256)) * 17):
        assert crc64(data) == f"{crc64nvme(data):016x}"


def test_every_tensor_of_every_checkpoint_is_read_without_objckpt(weed, written):
    uri, wanted = written
    reader = bucket_reader(weed, uri)
    entries = reader.entries(reader.newest())
    assert [(e["step"], e["head"], e["ok"]) for e in entries] == [(5, False, True), (10, True, True)]
    for entry in entries:
        found = reader.tensors(entry["index"])
        assert {k: bits(v) for k, v in found.items()} == wanted[entry["step"]]
    assert wanted[5]["optim.model.weight.step"] != wanted[10]["optim.model.weight.step"]


def test_three_requests_lead_to_the_newest_checkpoint(weed, written):
    reader = bucket_reader(weed, written[0])
    (head,) = [e for e in reader.entries(reader.newest()) if e["head"]]
    index = reader.referenced(head["index"])
    assert reader.requests == 3
    assert ask(index, ".metadata", lambda i: i["metadata"]) == {"step": 10}


def test_a_tensor_is_read_by_ranges_of_verified_blocks(weed, written):
    uri, wanted = written
    reader = bucket_reader(weed, uri)
    (head,) = [e for e in reader.entries(reader.newest()) if e["head"]]
    (record,) = reader.records(head["index"])
    assert len(record["objects"][0]["crc64"]) == 2
    by_name = {p["name"]: p for p in record["pieces"]}
    for name in ("model.big", "odd.empty", "rank-00000/loader.order"):
        assert reader.tensor_bytes(record, by_name[name]) == wanted[10][name][2]


def test_a_damaged_byte_is_found_by_the_blocks_checksum(weed, written):
    reader = bucket_reader(weed, written[0])
    (head,) = [e for e in reader.entries(reader.newest()) if e["head"]]
    (record,) = reader.records(head["index"])
    piece = next(p for p in record["pieces"] if p["name"] == "odd.bool")
    honest = reader.get

    def damaged(key: str, span: tuple[int, int] | None) -> bytes:
        data = bytearray(honest(key, span))
        data[-1] ^= 1
        return bytes(data)

    reader.get = damaged
    with pytest.raises(DamagedError, match="block 1"):
        reader.tensor_bytes(record, piece)
    with pytest.raises(DamagedError):
        reader.records(head["index"])


@pytest.mark.skipif(JQ is None, reason="jq is not installed: the other tests asked Python's json instead")
def test_jq_and_json_give_the_same_answers(weed, written):
    with_jq, without = bucket_reader(weed, written[0]), bucket_reader(weed, written[0], jq=None)
    version = with_jq.newest()
    entries = with_jq.entries(version)
    assert entries == without.entries(version)
    assert [with_jq.records(e["index"]) for e in entries] == [without.records(e["index"]) for e in entries]


def test_a_checkpoint_of_more_than_256_ranks_is_read_through_its_groups():
    """Written rank by rank as uploaders do, without a Checkpointer: 258 processes would be too many for a test."""
    from objckpt.commit import Run
    from objckpt.manifest import (
        DataObject,
        Policy,
        Rank,
        RankRecord,
        Save,
        data_key,
        encode_record,
        record_key,
    )
    from objckpt.retention import retain
    from objckpt.shard import layout, whole
    from objckpt.store import open_store

    ranks = 258
    store = open_store("memory://second-reader-groups")
    run = Run(store, retain=retain, pause=lambda _: None)
    version = run.start(launch="one", world_size=ranks, policy=Policy())
    save = Save(version.attempt, 7)
    for rank in map(Rank, range(ranks)):
        image = layout([whole(f"rank-{rank:05d}/own", "int64", (1,))], {})
        content = image.header + int(rank).to_bytes(8, "little")
        store.put(data_key(save, rank), content)
        objects = (DataObject(data_key(save, rank), image.size, BLOCK, (crc64nvme(content),)),)
        record = RankRecord(version.run, save, rank, ranks, 1.5, None, (), objects, image.pieces, None, None)
        assert store.create(record_key(save, rank), encode_record(record))
    run.commit(save, ranks)

    def get(key: str, span: tuple[int, int] | None) -> bytes:
        begin, end = span or (0, store.head(key).size)
        data = bytearray(end - begin)
        store.read(key, memoryview(data), begin)
        return bytes(data)

    reader = SecondReader(lambda prefix: [o.key for o in store.list(prefix)], get)
    (entry,) = reader.entries(reader.newest())
    before = reader.requests
    found = reader.tensors(entry["index"])
    assert {k: int(v) for k, v in found.items()} == {f"rank-{r:05d}/own": r for r in range(ranks)}
    assert reader.requests - before == 3  # the index and two groups, not 258 records


# ------------------------------------------------------------------ the document itself

FORMAT = (Path(__file__).parent.parent / "objckpt" / "FORMAT.md").read_text()


def compact(text: str) -> bytes:
    return json.dumps(json.loads(text), separators=(",", ":")).encode() + b"\n"


def test_the_examples_are_one_checkpoint_from_manifest_to_tensor():
    version, index, record = map(compact, re.findall(r"```json\n(.*?)```", FORMAT, re.DOTALL))
    (header,) = re.findall(r"```text\n(.*?)\n```", FORMAT, re.DOTALL)
    (data,) = re.findall(r"and the data `([0-9a-f ]+)`", FORMAT)
    shard = (248).to_bytes(8, "little") + header.encode() + b" " * 13 + bytes.fromhex(data)
    objects = {
        "manifest/00000000000000000003.json": version,
        json.loads(version)["kept"][1]["index"]["key"]: index,
        json.loads(index)["records"][0]["key"]: record,
        json.loads(record)["objects"][0]["key"]: shard,
    }
    reader = SecondReader(
        lambda prefix: [k for k in objects if k.startswith(prefix)], lambda key, _: objects[key]
    )
    (head,) = [e for e in reader.entries(reader.newest()) if e["head"]]
    assert {k: list(v.shape) for k, v in reader.tensors(head["index"]).items()} == {
        "model.bias": [1],
        "model.weight": [1, 2],
    }


def test_the_examples_are_what_objckpt_reads_and_writes():
    from objckpt import manifest

    version, index, record = map(compact, re.findall(r"```json\n(.*?)```", FORMAT, re.DOTALL))
    save = manifest.Save(manifest.Attempt(1), manifest.Step(10))
    assert manifest.encode_version(manifest.decode_version(version, 3)) == version
    assert manifest.encode_index(manifest.decode_index(index, save)) == index
    assert manifest.encode_record(manifest.decode_record(record, save, manifest.Rank(0))) == record


def test_every_field_tag_and_dtype_of_the_code_is_in_the_document():
    from objckpt import manifest
    from objckpt.shard import DTYPES
    from objckpt.state import capture, values

    told = set(re.findall(r"`([^`\s]+)`", FORMAT))
    save = manifest.Save(manifest.Attempt(1), manifest.Step(1))
    record = manifest.RankRecord("", save, manifest.Rank(0), 1, 0.0, None, (), (), (), None, None)
    group = json.loads(manifest.encode_group(manifest.GroupRecord("", save, 0, 1, (record,))))
    fields = {*group, *group["records"][0]}
    for text in re.findall(r"```json\n(.*?)```", FORMAT, re.DOTALL):
        fields |= json.loads(text).keys()
    assert fields <= told, fields - told
    assert {f"`{name}`" for name in DTYPES if f"`{name}`" not in FORMAT} == set()
    assert all(f"`{code}`" in FORMAT for code, _ in DTYPES.values())
    tags = {*values._DECODERS, *values._MAPPING_TAGS, *values._SEQUENCE_TAGS, *values._CLOSED_TAGS}
    tags |= set(re.findall(r"^(\w+)  ", capture.__doc__ or "", re.MULTILINE))
    tags |= {"tensor", "ndarray", "module", "optimizer", "generator", "object", "loader", "per_rank"}
    rows = {
        tag
        for row in re.findall(r"^\| (`[^|]*) \|", FORMAT, re.MULTILINE)
        for tag in re.findall(r"`(\w+)`", row)
    }
    assert tags <= rows, tags - rows
    assert base64.b64encode(crc64nvme(b"123456789").to_bytes(8, "big")) == b"rosUhgp5mIg="
