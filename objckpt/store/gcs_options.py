"""What a user may say about a GCS store, checked before anything is asked of a server.

Invariants: a name that nobody reads is refused and the nearest one that is read is named; secrets show in no ``repr`` and no
message; defaults stand here and nowhere else.

Called by ``gcs``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from objckpt.errors import ConfigError
from objckpt.store.s3_options import check_tuning, nearest

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

#: The ``token`` of those who send none.
ANONYMOUS: Final = "anon"
#: What gcsfs and gcsfs's users call these things.
_MEANT: Final = {
    "endpoint": "endpoint_url",
    "credentials": "token",
    "key": "token",
    "anon": "token",
    "region": "endpoint_url",
    "timeout": "deadline",
    "requests_timeout": "deadline",
}
#: Ways to log in that gcsfs has and objckpt has not.
_INTERACTIVE: Final = frozenset({"browser", "cache", "cloud"})
#: Kinds of credential files that hold all that is needed to log in, and run no program and call no foreign address for it.
KINDS: Final = ("service_account", "authorized_user")
_MIB: Final = 1 << 20

Credential: TypeAlias = "str | Mapping[str, Any] | Credentials | None"


@dataclass(frozen=True, slots=True)
class GCSOptions:
    """The options of a GCS store: gcsfs's names, and three of our own.

    ``token``: which credentials. None is google.auth's own search (``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's file, the metadata
    server), or none at all where ``STORAGE_EMULATOR_HOST`` names the endpoint; "anon" sends none; else the path of a service account's
    or an authorized user's JSON file, or what such a file holds; or google.auth's credentials, which cannot be told to another
    process, so that a ``Checkpointer`` cannot take them. ``project``: what the client is told, though no verb needs one.
    ``endpoint_url``: where, in place of storage.googleapis.com. ``part_size`` in bytes, and ``connections`` for one object; ``deadline``
    in seconds, after which one request is not tried again.
    """

    project: str | None = None
    token: Credential = field(default=None, repr=False)
    endpoint_url: str | None = None
    part_size: int = 16 * _MIB
    connections: int = 4
    deadline: float = 120.0

    @classmethod
    def from_storage_options(cls, given: Mapping[str, Any]) -> GCSOptions:
        """The options that ``given`` names. :class:`ConfigError` for a name nobody reads and a value that cannot be."""
        known = {entry.name for entry in fields(cls)}
        for name in given:
            if name not in known:
                meant = _MEANT.get(name) or nearest(name, known)
                raise ConfigError(f"unknown option {name!r} for a GCS store: did you mean {meant}?")
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        if self.project is not None and not isinstance(self.project, str):
            raise ConfigError(f"project={self.project!r} must be the name of a project")
        _check_token(self.token)
        if not _is_endpoint(self.endpoint_url):
            raise ConfigError(
                "endpoint_url must be http://host[:port] or https://host[:port], without a path and without a password: "
                "give credentials as token"
            )
        check_tuning(self.part_size, self.connections, self.deadline, "GCS")

    def key_file(self) -> Mapping[str, Any] | None:
        """What the key file says that ``token`` is or names; None if it does neither. :class:`ConfigError` if it cannot be used."""
        if isinstance(self.token, Mapping):
            return _of_known_kind(self.token, "token")
        if not isinstance(self.token, str) or self.token == ANONYMOUS:
            return None
        try:
            text = Path(self.token).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            # It is not shown: gcsfs also takes a bare access token here, and this may be one.
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise ConfigError(
                f"token names no file that can be read ({reason}): give the path of a service account's key, 'anon', a dict, or nothing "
                "for google.auth's own search"
            ) from None
        try:
            held = json.loads(text)
        except ValueError:
            held = None
        if not isinstance(held, dict):
            raise ConfigError(f"{self.token} holds no JSON object: token wants a key file")
        return _of_known_kind(held, self.token)


def _check_token(token: object) -> None:
    if isinstance(token, str) and token in _INTERACTIVE:
        raise ConfigError(
            f"token={token!r} is gcsfs's: leave token out, and google.auth finds the credentials of gcloud, of a key file named by "
            "GOOGLE_APPLICATION_CREDENTIALS, or of the machine"
        )
    if token is None or isinstance(token, str | Mapping):
        return
    # By its behaviour, and not by its class: google.auth takes its time to load.
    if not (callable(getattr(token, "before_request", None)) and callable(getattr(token, "refresh", None))):
        raise ConfigError(
            f"token must be None, 'anon', a path, a dict or google.auth credentials, not {type(token).__name__}"
        )


def _of_known_kind(held: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    kind = held.get("type")
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: credentials of type {kind!r} are not read from here, only {' and '.join(KINDS)}: set "
            "GOOGLE_APPLICATION_CREDENTIALS to that file and leave token out"
        )
    return held


def _is_endpoint(url: str | None) -> bool:
    if url is None:
        return True
    try:
        parts = urlsplit(url)
        _ = parts.port
    except (ValueError, AttributeError):
        return False
    bare = parts.path in {"", "/"} and not parts.query and "@" not in parts.netloc
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and bare
