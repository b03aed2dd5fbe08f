"""What ``s3_additional_kwargs`` may say, and the headers that say it to S3.

Invariants: only names that objckpt knows to hand on are taken, so that none is dropped in silence (an encryption key that some
requests lack is worse than an error); each goes with every request that S3 wants it on, and with no other.

Called by ``s3_options`` and ``s3`` (which check), ``s3_session`` and ``s3_connect`` (which send).
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Final

from objckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: boto3's names of what is said when an object is made (PutObject, CreateMultipartUpload; not with its parts), and their headers.
ON_WRITES: Final = {
    "ACL": "x-amz-acl",
    "BucketKeyEnabled": "x-amz-server-side-encryption-bucket-key-enabled",
    "GrantFullControl": "x-amz-grant-full-control",
    "GrantRead": "x-amz-grant-read",
    "GrantReadACP": "x-amz-grant-read-acp",
    "GrantWriteACP": "x-amz-grant-write-acp",
    "SSEKMSEncryptionContext": "x-amz-server-side-encryption-context",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "StorageClass": "x-amz-storage-class",
    "Tagging": "x-amz-tagging",
}
#: Likewise, of what is said with every request.
ON_ALL: Final = {
    "ExpectedBucketOwner": "x-amz-expected-bucket-owner",
    "RequestPayer": "x-amz-request-payer",
}
#: What directory buckets (S3 Express) have none of.
NOT_ON_EXPRESS: Final = frozenset(
    {
        "ACL",
        "GrantFullControl",
        "GrantRead",
        "GrantReadACP",
        "GrantWriteACP",
        "RequestPayer",
        "SSEKMSEncryptionContext",
        "Tagging",
    }
)
#: Their objects must be restored before they can be read, which takes minutes to days.
_ASLEEP: Final = frozenset({"DEEP_ARCHIVE", "GLACIER"})
_KMS: Final = ("SSEKMSKeyId", "SSEKMSEncryptionContext", "BucketKeyEnabled")
#: What no header may hold.
_NOT_IN_HEADERS: Final = re.compile(r"[^\t\x20-\x7e]")


def check_additional(given: Mapping[str, Any]) -> None:
    """:class:`ConfigError` for a name that is not handed on, with the nearest one that is, and for a value that cannot be."""
    for name, value in given.items():
        if name.startswith("SSECustomer"):
            raise ConfigError(
                f"s3_additional_kwargs[{name!r}] is not taken: with a key of the customer's (SSE-C), each reader of the run would "
                "need the key, `objckpt ls` too, and it would lie in every node's configuration: give ServerSideEncryption='aws:kms' "
                "and SSEKMSKeyId"
            )
        if name not in ON_WRITES and name not in ON_ALL:
            known = sorted(ON_WRITES | ON_ALL)
            raise ConfigError(
                f"s3_additional_kwargs[{name!r}] is not one that objckpt hands on: did you mean {_nearest(name, known)!r}? "
                f"Known are {', '.join(known)}"
            )
        if not isinstance(value, bool if name == "BucketKeyEnabled" else str):
            kind = "True or False" if name == "BucketKeyEnabled" else "text"
            raise ConfigError(f"s3_additional_kwargs[{name!r}] must be {kind}, not {value!r}")
        if isinstance(value, str) and (not value or _NOT_IN_HEADERS.search(value)):
            raise ConfigError(
                f"s3_additional_kwargs[{name!r}] cannot stand in a header: printable ASCII is needed"
            )
    if given.get("StorageClass") in _ASLEEP:
        raise ConfigError(
            f"s3_additional_kwargs: objects of StorageClass {given['StorageClass']!r} cannot be read before they are restored, so no "
            "run could resume: take STANDARD, INTELLIGENT_TIERING, STANDARD_IA or GLACIER_IR"
        )
    if not given.get("ServerSideEncryption", "").startswith("aws:kms"):
        for name in _KMS:
            if name in given:
                raise ConfigError(
                    f"s3_additional_kwargs: {name} has no effect without ServerSideEncryption='aws:kms'"
                )


def is_directory_bucket(bucket: str) -> bool:
    """Whether the name is that of an S3 Express bucket, which only directory buckets may have: ``name--zone--x-s3``."""
    return bucket.endswith("--x-s3")


def headers_of(additional: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """The headers of those ``additional`` arguments (checked) that ``names`` knows."""
    return {
        header: str(additional[name]).lower() if isinstance(additional[name], bool) else additional[name]
        for name, header in names.items()
        if name in additional
    }


def _nearest(name: str, known: Iterable[str]) -> str:
    folded = {entry.lower(): entry for entry in known}
    return folded[difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.0)[0]]
