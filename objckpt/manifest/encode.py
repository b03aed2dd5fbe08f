"""Records as JSON: bytes that are a pure function of the value."""

from __future__ import annotations

import json
from typing import Any

from awscrt.checksums import crc64nvme

from objckpt.manifest.keys import Save
from objckpt.manifest.records import (
    FORMAT_VERSION,
    GroupRecord,
    Index,
    Keep,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLast,
    Piece,
    Policy,
    RankRecord,
    Reference,
    Version,
)


def _dump(kind: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(
        {"format": f"objckpt.{kind}", "version": FORMAT_VERSION, **body},
        separators=(",", ":"),
        allow_nan=False,
    )
    return seal(text.encode().removesuffix(b"}"))


def seal(opened: bytes) -> bytes:
    """A record, given its bytes up to the last field: that one is the CRC-64/NVME of all bytes before it."""
    return opened + b',"crc64":"%016x"}\n' % crc64nvme(opened)


def _hex(crc: int) -> str:
    return f"{crc:016x}"


def _save(save: Save | None) -> dict[str, int] | None:
    return None if save is None else {"attempt": save.attempt, "step": save.step}


def _reference(ref: Reference) -> dict[str, Any]:
    return {"key": ref.key, "size": ref.size, "crc64": _hex(ref.crc64)}


def encode_policy(policy: Policy) -> dict[str, Any]:
    """A policy as it stands in versions."""
    return {"keep": [_rule(rule) for rule in policy.keep], "lag": policy.lag}


def _rule(rule: Keep) -> dict[str, Any]:
    match rule:
        case KeepLast(count):
            return {"rule": "last", "count": count}
        case KeepEvery(steps):
            return {"rule": "every", "steps": steps}
        case KeepBest(metric, count, mode):
            return {"rule": "best", "metric": metric, "count": count, "mode": mode}
        case KeepFor(days):
            return {"rule": "for", "days": days}


def encode_version(v: Version) -> bytes:
    """The bytes of a version."""
    return _dump(
        "manifest",
        {
            "number": v.number,
            "change": v.change,
            "run": v.run,
            "attempt": v.attempt,
            "launch": v.launch,
            "nonce": v.nonce,
            "world_size": v.world_size,
            "policy": encode_policy(v.policy),
            "superseded": list(v.superseded),
            "head": _save(v.head),
            "kept": [
                {
                    **(_save(e.save) or {}),
                    "parent": _save(e.parent),
                    "world_size": e.world_size,
                    "nbytes": e.nbytes,
                    "created_at": e.created_at,
                    "index": _reference(e.index),
                    "bases": [_save(b) for b in e.bases],
                    "pinned": e.pinned,
                    "metrics": {name: float(value) for name, value in e.metrics},
                }
                for e in v.kept
            ],
        },
    )


def encode_index(index: Index) -> bytes:
    """The bytes of an index."""
    return _dump(
        "index",
        {
            "run": index.run,
            **(_save(index.save) or {}),
            "world_size": index.world_size,
            "created_at": index.created_at,
            "metadata": index.metadata,
            "nbytes": index.nbytes,
            "bases": [_save(b) for b in index.bases],
            "records": [_reference(r) for r in index.records],
        },
    )


def _record_body(r: RankRecord) -> dict[str, Any]:
    return {
        "run": r.run,
        **(_save(r.save) or {}),
        "rank": r.rank,
        "world_size": r.world_size,
        "created_at": r.created_at,
        "metadata": r.metadata,
        "bases": [_save(b) for b in r.bases],
        "objects": [
            {"key": o.key, "size": o.size, "block_size": o.block_size, "crc64": [_hex(c) for c in o.crc64]}
            for o in r.objects
        ],
        "pieces": [_piece(p) for p in r.pieces],
        "values": r.values,
        "rank_values": r.rank_values,
    }


def _piece(p: Piece) -> dict[str, Any]:
    """A piece as it stands in records and journals."""
    return {
        "name": p.name,
        "dtype": p.dtype,
        "global_shape": list(p.global_shape),
        "offset": list(p.offset),
        "shape": list(p.shape),
        "object": p.obj,
        "range": [p.begin, p.end],
    }


def encode_record(record: RankRecord) -> bytes:
    """The bytes of a rank record."""
    return _dump("record", _record_body(record))


def encode_group(group: GroupRecord) -> bytes:
    """The bytes of a group record."""
    return _dump(
        "group",
        {
            "run": group.run,
            **(_save(group.save) or {}),
            "group": group.group,
            "world_size": group.world_size,
            "records": [_record_body(r) for r in group.records],
        },
    )
