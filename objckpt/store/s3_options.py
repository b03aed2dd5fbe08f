"""What a user may say about an S3 store, checked before anything is asked of a server.

Invariants: a name that nobody reads is refused and the nearest one that is read is named; secrets show in no ``repr`` and no
message; defaults stand here and nowhere else.

Called by ``s3``; what is said of tuning holds for ``gcs`` too.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeGuard
from urllib.parse import urlsplit

from objckpt.errors import ConfigError
from objckpt.store.s3_headers import check_additional

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MIB: Final = 1 << 20
#: S3's own limits, and GCS's.
SMALLEST_PART: Final = 5 * _MIB
LARGEST_PART: Final = 5 << 30
MOST_PARTS: Final = 10_000

#: What ``client_kwargs`` may hold: arguments of ``boto3.session.Session.client``.
_CLIENT_KWARGS: Final = frozenset({
    "aws_access_key_id",
    "aws_account_id",
    "aws_secret_access_key",
    "aws_session_token",
    "endpoint_url",
    "region_name",
    "use_ssl",
    "verify",
})  # fmt: skip
#: s3fs takes these names too.
_ALIASES: Final = {"username": "key", "password": "secret"}
#: What ``client_kwargs`` may say in other words.
_TOP_LEVEL: Final = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "endpoint_url": "endpoint_url",
    "use_ssl": "use_ssl",
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """The options of an S3 store: s3fs's names, and three of our own.

    ``key``, ``secret``, ``token``, ``profile``, ``anon``: which credentials (none given: boto3's own chain; a profile may name a
    role to assume by ``role_arn`` and ``source_profile``). ``endpoint_url`` and ``use_ssl``: where. ``client_kwargs``:
    ``region_name``, ``verify`` (False, or a file of certificates) and the like; ``config_kwargs``: what
    ``botocore.config.Config`` takes. ``s3_additional_kwargs``: what ``s3_headers`` knows, in boto3's names, for every object of
    the run; ``requester_pays``: the short form of its ``RequestPayer``. ``part_size`` in bytes, of multipart uploads, and
    ``connections`` for one of them; ``deadline`` in seconds, after which one request is not tried again.
    """

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    client_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    s3_additional_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    requester_pays: bool = False
    profile: str | None = None
    anon: bool = False
    use_ssl: bool = True
    part_size: int = 16 * _MIB
    connections: int = 4
    deadline: float = 120.0

    @classmethod
    def from_storage_options(cls, given: Mapping[str, Any]) -> S3Options:
        """The options that ``given`` names. :class:`ConfigError` for a name nobody reads and a value that cannot be."""
        known = {entry.name for entry in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            target = _ALIASES.get(name, name)
            if target not in known:
                raise ConfigError(_unknown_option(name, known))
            values[target] = value
        client_kwargs = dict(values.get("client_kwargs") or {})
        for name in client_kwargs:
            if name not in _CLIENT_KWARGS:
                raise ConfigError(f"client_kwargs: {_unknown_option(name, _CLIENT_KWARGS)}")
        for name, target in _TOP_LEVEL.items():
            if name in client_kwargs:
                value = client_kwargs.pop(name)
                if values.get(target, value) != value:
                    raise ConfigError(f"{target} and client_kwargs[{name!r}] differ: give one of them")
                values[target] = value
        values["client_kwargs"] = client_kwargs
        values["config_kwargs"] = dict(values.get("config_kwargs") or {})
        additional = dict(values.get("s3_additional_kwargs") or {})
        if values.get("requester_pays"):
            additional["RequestPayer"] = "requester"
        values["s3_additional_kwargs"] = additional
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        if (self.key is None) != (self.secret is None):
            given, missing = ("key", "secret") if self.secret is None else ("secret", "key")
            raise ConfigError(
                f"{given} is given without {missing}: give both, or none to use boto3's own chain"
            )
        if self.anon and (self.key is not None or self.profile is not None):
            raise ConfigError("anon=True sends no credentials, but some are given: leave one of the two out")
        if not _is_endpoint(self.endpoint_url):
            raise ConfigError(
                "endpoint_url must be http://host[:port] or https://host[:port], without a password: "
                "give credentials as key and secret"
            )
        for name in ("retries", "signature_version"):
            if name in self.config_kwargs:
                what = (
                    "objckpt retries by itself: give deadline=<seconds>"
                    if name == "retries"
                    else "use anon=True"
                )
                raise ConfigError(f"config_kwargs[{name!r}] is not taken; {what}")
        check_additional(self.s3_additional_kwargs)
        check_tuning(self.part_size, self.connections, self.deadline, "S3")


def check_tuning(part_size: object, connections: object, deadline: float, name: str) -> None:
    """:class:`ConfigError` for what the store called ``name`` cannot do."""
    if not _is_int(part_size) or not SMALLEST_PART <= part_size <= LARGEST_PART:
        raise ConfigError(
            f"part_size={part_size!r} must be a number of bytes between 5 MiB and 5 GiB ({name}'s own limits)"
        )
    if not _is_int(connections) or connections < 1:
        raise ConfigError(f"connections={connections!r} must be a whole number of at least 1")
    if not deadline > 0:
        raise ConfigError(f"deadline={deadline!r} must be a number of seconds above 0")


def part_size_for(size: int, preferred: int) -> int:
    """The part size for an object of ``size`` bytes: ``preferred``, or the smallest whole number of MiB above it that needs no
    more than 10,000 parts.
    """
    if size <= preferred * MOST_PARTS:
        return preferred
    return -(-size // (MOST_PARTS * _MIB)) * _MIB


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of ``known`` (not empty) that looks most like ``name``."""
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def _unknown_option(name: str, known: Iterable[str]) -> str:
    # Many know the inner name only, so both levels are searched.
    shown = {entry: f"client_kwargs={{{entry!r}: ...}}" for entry in _CLIENT_KWARGS} | {
        entry: entry for entry in known
    }
    return f"unknown option {name!r} for an S3 store: did you mean {shown[nearest(name, shown)]}?"


def _is_endpoint(url: str | None) -> bool:
    if url is None:
        return True
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and "@" not in parts.netloc


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
