"""The credentials of a GCS store: where they come from, and the token that each request carries.

Invariants: a token is fetched by one thread while the others wait for it; a token that was refused is replaced once, however many
threads come with it; no key and no token enters a message.

Called by ``gcs_session``.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final

import google.auth
import google.auth.exceptions
import google.auth.transport.requests
import google.oauth2.credentials
import google.oauth2.service_account
from google.auth.credentials import AnonymousCredentials, with_scopes_if_required

from objckpt.errors import ConfigError
from objckpt.store.gcs_options import ANONYMOUS

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

    from objckpt.store.gcs_options import GCSOptions

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)


class Login:
    """The credentials of all requests, safe to call from many threads. ``timeout`` in seconds, for each request for a token."""

    def __init__(self, credentials: Credentials, timeout: float) -> None:
        self.credentials: Any = credentials  # half of its methods have no types
        self.is_anonymous = isinstance(credentials, AnonymousCredentials)
        #: How google-auth asks for tokens.
        self.transport = functools.partial(google.auth.transport.requests.Request(), timeout=timeout)
        self._lock = threading.Lock()

    @property
    def token(self) -> str | None:
        """The access token that requests carry now, if any."""
        token: str | None = getattr(self.credentials, "token", None)
        return token

    def headers(self, method: str, url: str) -> dict[str, str]:
        """What a request carries, with a token that is good for some minutes."""
        headers: dict[str, str] = {}
        with self._lock:
            self.credentials.before_request(self.transport, method, url, headers)
        return headers

    def renew(self, refused: str | None) -> None:
        """Fetch a new token, unless another thread has replaced ``refused`` meanwhile."""
        with self._lock:
            if self.token == refused:
                self.credentials.refresh(self.transport)

    def clean(self, text: str) -> str:
        """``text`` without our token, should a server repeat it."""
        return text.replace(self.token, "***") if self.token else text


def credentials_for(options: GCSOptions, *, in_emulator: bool) -> Credentials:
    """What ``options.token`` means. ``in_emulator``: none are needed if none are given. Google-auth's errors pass."""
    token: Any = options.token
    if token == ANONYMOUS or (token is None and in_emulator):
        return AnonymousCredentials()  # type: ignore[no-untyped-call] # google-auth says no types here
    held = options.key_file()
    if held is not None:
        kind = (
            google.oauth2.service_account.Credentials.from_service_account_info
            if held["type"] == "service_account"
            else google.oauth2.credentials.Credentials.from_authorized_user_info
        )
        try:
            credentials: Credentials = kind(dict(held), scopes=_SCOPES)
        except ValueError:
            # The library's own message may repeat a part of the key.
            raise ConfigError(f"token: the {held['type']} key is not complete, or not a key") from None
        return credentials
    if token is None:
        token, _ = google.auth.default(scopes=_SCOPES)
    scoped: Credentials = with_scopes_if_required(token, _SCOPES)  # type: ignore[no-untyped-call] # google-auth says no types here
    return scoped
