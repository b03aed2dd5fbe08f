"""What S3 and GCS say no with: what it is called in errors of objckpt, whatever way each of them is read.

Invariants: every error names the object by its URI, says what the endpoint said, and what to do next; no secret enters it.

Called by ``s3_refusal``, ``s3_session``, ``gcs_refusals`` and ``gcs_session``.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from objckpt.errors import (
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    StoreTransientError,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class UploadGoneError(StoreNotFoundError):
    """The store does not know the multipart upload: completed or aborted before."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, as messages name it: below ``root`` of ``bucket`` at ``endpoint``. ``clean`` takes our secrets out of what a
    server wrote. Each ``key`` is the bucket's; ``said`` is what the endpoint answered, clean.
    """

    uri: str
    bucket: str
    root: str
    endpoint: str
    clean: Callable[[str], str]

    def where(self, key: str) -> str:
        """The URI of the bucket's ``key``."""
        return f"{self.uri.partition('://')[0]}://{self.bucket}/{key}"

    def relative(self, key: str) -> str:
        """The bucket's key as the store's callers know it."""
        return key.removeprefix(self.root)

    def corrupt(self, said: str, key: str) -> CorruptCheckpointError:
        """Other bytes arrived."""
        return CorruptCheckpointError(
            f"{self.where(key)}: the store received other bytes than were sent ({said}): send it again"
        )

    def transient(self, said: str, key: str) -> StoreTransientError:
        """It may work later."""
        text = f"{self.where(key)}: {self.endpoint} answered {said}"
        return StoreTransientError(text, uri=self.uri, key=self.relative(key))

    def not_allowed(self, said: str, key: str, todo: str) -> StorePermissionError:
        """The credentials are not good, or not good enough; ``todo`` says what would help."""
        text = f"{self.where(key)}: {self.endpoint} refused the request ({said}): {todo}"
        return StorePermissionError(text, uri=self.uri, key=self.relative(key))

    def no_credentials(self, error: Exception, key: str, todo: str) -> StorePermissionError:
        """There are none, or none that can be used; ``todo`` says how to give some."""
        text = f"{self.where(key)}: no usable credentials ({self.clean(str(error))}): {todo}"
        return StorePermissionError(text, uri=self.uri, key=self.relative(key))

    def no_upload(self, key: str) -> UploadGoneError:
        """There is no such multipart upload."""
        text = f"{self.where(key)}: the store does not know the multipart upload (aborted meanwhile?): put it again"
        return UploadGoneError(text, uri=self.uri, key=self.relative(key))

    def no_bucket(self, key: str) -> StoreNotFoundError:
        """There is no such bucket: that is about the whole store, so the error's ``key`` is "", other than that of :meth:`no_key`."""
        text = f"{self.where(key)}: there is no bucket {self.bucket!r} at {self.endpoint}: create it, or mend the URI"
        return StoreNotFoundError(text, uri=self.uri)

    def no_key(self, key: str) -> StoreNotFoundError:
        """There is no such object."""
        text = f"{self.where(key)}: there is no such key in the bucket: it was never written, was deleted, or the URI's prefix is wrong"
        return StoreNotFoundError(text, uri=self.uri, key=self.relative(key))

    def refused(self, said: str, key: str) -> StoreError:
        """Any other refusal."""
        text = f"{self.where(key)}: {self.endpoint} refused the request ({said})"
        return StoreError(text, uri=self.uri, key=self.relative(key))

    def unanswered(self, error: Exception, key: str) -> StoreTransientError:
        """No answer came."""
        text = f"{self.where(key)}: no answer from {self.endpoint}: {self.clean(str(error))}"
        return StoreTransientError(
            f"{text}. Is the endpoint right, and reachable from here?", uri=self.uri, key=self.relative(key)
        )

    def untrusted(self, reason: str, key: str, todo: str) -> StoreError:
        """A certificate was not accepted; ``todo`` says how to name the authority that signed it."""
        text = f"{self.where(key)}: {reason}: {todo}"
        return StoreError(text, uri=self.uri, key=self.relative(key))


def xml_text(body: bytes, name: str) -> str | None:
    """What the XML of a refusal has in the element ``name``, if it has one; the rest need not be well formed."""
    found = re.search(rb"<%(name)b>\s*([^<]*?)\s*</%(name)b>" % {b"name": name.encode()}, body)
    return None if found is None else html.unescape(found[1].decode("utf-8", "replace"))
