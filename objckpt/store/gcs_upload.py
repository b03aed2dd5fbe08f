"""One object in many parts: by GCS's multipart upload (XML API), or by composing objects where there is none.

Invariants: the object is not begun to be made visible before the CRCs of what was sent are the expected ones, and is taken away
again if the store then says another CRC-32C than ours; every part carries its CRC-32C, and the store's own is compared with it; what an
upload leaves behind when it fails, parts or temporary objects, is removed once nothing of it is on its way any more; a lost answer is
found out, never guessed.

Called by ``gcs``.
"""

from __future__ import annotations

import logging
import secrets
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from awscrt.checksums import combine_crc32c, combine_crc64nvme, crc32c, crc64nvme

from objckpt.errors import CorruptCheckpointError, StoreError, StoreNotFoundError, StoreTransientError
from objckpt.store.checksums import check_unchanged, decode_crc, encode_crc32c, joined
from objckpt.store.gcs_refusals import Refusal
from objckpt.store.gcs_session import CONTROL_CONNECTIONS, UPLOAD_OF, GCSSession, Stored
from objckpt.store.uploads import abort_failed, complete
from objckpt.store.window import in_window

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from objckpt.store.http import Answer
    from objckpt.store.retry import RetryPolicy

_log = logging.getLogger("objckpt.store")

_OK: Final = 200
#: What a DELETE may be answered with.
_DONE: Final = frozenset({200, 204})
#: GCS takes that many sources in one call.
MOST_SOURCES: Final = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of the object that the store holds, and how it is called there: an ETag, or the key of a temporary object."""

    name: str
    size: int
    crc32c: int
    crc64: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be put: ``data`` under ``key`` (the bucket's), in parts of ``part_size`` bytes over ``connections`` connections.
    ``incoming`` is the bucket's prefix for temporary objects.
    """

    session: GCSSession
    retry: RetryPolicy
    key: str
    incoming: str
    data: memoryview
    part_size: int
    connections: int


def put_in_parts(job: Job, crc64: int | None) -> None:
    """Put all of it, the way that the endpoint has. ``crc64`` is what ``job.data`` should have; None if that is not known."""
    upload_id = job.retry.run(partial(_begin, job)) if job.session.has_xml is not False else None
    if upload_id is not None:
        _put_by_multipart(job, upload_id, crc64)
    else:
        _put_by_compose(job, crc64)


# --- what both ways share


def _send_all(job: Job, send: Callable[[int, memoryview, int], str], expected: int | None) -> list[_Part]:
    """All parts in order, by ``send(number from 1 on, its bytes, their CRC-32C)``, which names what it stored and is retried here.
    :class:`CorruptCheckpointError` if together they have another CRC-64 than ``expected``.
    """

    def one(number: int, failed: threading.Event) -> _Part:
        body = job.data[(number - 1) * job.part_size : number * job.part_size]
        crc64 = crc64nvme(body) if expected is not None else 0
        crc = crc32c(body)
        name = job.retry.run(partial(send, number, body, crc), abandoned=failed)
        return _Part(name, len(body), crc, crc64)

    count = -(-len(job.data) // job.part_size)
    parts = in_window(one, range(1, count + 1), job.connections)
    if expected is not None:
        found = joined(combine_crc64nvme, [(part.crc64, part.size) for part in parts])
        check_unchanged(job.session.place.where(job.key), expected, found)
    return parts


def _whole(parts: Sequence[_Part]) -> _Part:
    """What the parts are together, without a name."""
    crc = joined(combine_crc32c, [(part.crc32c, part.size) for part in parts])
    return _Part("", sum(part.size for part in parts), crc)


def check_stored(session: GCSSession, retry: RetryPolicy, key: str, stored: Stored, crc: int) -> None:
    """:class:`CorruptCheckpointError`, and the object is taken away again, if it has another CRC-32C than ``crc``, ours."""
    if stored.crc32c == crc:
        return
    what = f"{session.place.where(key)}: the store has CRC-32C {stored.crc32c:08x} for what was sent with {crc:08x}"
    try:
        retry.run(partial(session.remove, key, stored.generation))
    except StoreError as error:
        raise CorruptCheckpointError(
            f"{what}, and it could not be removed ({error}): delete it, then put it again"
        ) from error
    raise CorruptCheckpointError(f"{what}: it was removed: put it again")


def _finish(job: Job, whole: _Part, finish: Callable[[], Stored]) -> None:
    """Make the object visible by ``finish``, which is retried here, and compare what the store then has."""

    def held() -> Stored | None:
        try:
            found = job.retry.run(partial(job.session.look, job.key))
        except StoreNotFoundError:
            return None
        return found if (found.crc32c, found.size) == (whole.crc32c, whole.size) else None

    check_stored(job.session, job.retry, job.key, complete(job.retry, finish, held), whole.crc32c)


# --- the XML API's multipart upload


def _begin(job: Job) -> str | None:
    """The id of a new upload; None if the endpoint has no XML API, which is remembered."""
    session = job.session
    headers = {"Content-Type": "application/octet-stream"}
    answer = session.request("POST", session.xml_target(job.key, "uploads"), job.key, headers=headers)
    if answer.status != _OK:
        if session.has_xml is None and Refusal.of(answer).speaks_no_xml:
            session.has_xml = False
            _log.info("%s has no XML API: large objects are composed of temporary objects", session.endpoint)
            return None
        raise session.refused(answer, job.key)
    upload_id = _text_of(answer, "UploadId")
    if not upload_id:
        raise _cut(job, "the beginning of an upload")
    session.has_xml = True
    return upload_id


def _put_by_multipart(job: Job, upload_id: str, crc64: int | None) -> None:
    try:
        parts = _send_all(job, partial(_send_part, job, upload_id), crc64)
        body = _completion(parts)
        _finish(job, _whole(parts), lambda: _complete(job, upload_id, body))
    except BaseException:  # a Ctrl-C too leaves no parts that are billed for ever
        abort_failed(job.retry, partial(abort_upload, job.session, job.key, upload_id), job.key)
        raise


def _send_part(job: Job, upload_id: str, number: int, body: memoryview, crc: int) -> str:
    session = job.session
    target = session.xml_target(job.key, f"partNumber={number}&{_id_query(upload_id)}")
    headers = {"x-goog-hash": f"crc32c={encode_crc32c(crc)}"}
    answer = session.request("PUT", target, job.key, headers=headers, body=body)
    if answer.status != _OK:
        raise session.refused(answer, job.key)
    etag = answer.headers.get("ETag")
    if etag is None:
        raise _cut(job, f"part {number}")
    said = _crc32c_of(answer)
    if said is not None and said != crc:
        raise CorruptCheckpointError(
            f"{session.place.where(job.key)}: the store received part {number} with CRC-32C {said:08x}, not {crc:08x}: put it again"
        )
    return etag


def _completion(parts: Sequence[_Part]) -> bytes:
    root = ET.Element("CompleteMultipartUpload")
    for number, part in enumerate(parts, 1):
        entry = ET.SubElement(root, "Part")
        ET.SubElement(entry, "PartNumber").text = str(number)
        ET.SubElement(entry, "ETag").text = part.name
    return ET.tostring(root)


def _complete(job: Job, upload_id: str, body: bytes) -> Stored:
    session = job.session
    answer = session.request(
        "POST",
        session.xml_target(job.key, _id_query(upload_id)),
        job.key,
        headers={"Content-Type": "application/xml"},
        body=body,
    )
    if answer.status != _OK or Refusal.of(answer).is_xml:
        raise session.refused(answer, job.key)
    # The answer need not tell the CRC-32C of the whole.
    return session.look(job.key)


def abort_upload(session: GCSSession, key: str, upload_id: str) -> None:
    """Forget a multipart upload and its parts, not retried. :class:`UploadGoneError` if there is none."""
    answer = session.request("DELETE", session.xml_target(key, _id_query(upload_id)), key)
    if answer.status not in _DONE:
        raise session.refused(answer, key)


def _id_query(upload_id: str) -> str:
    return f"uploadId={quote(upload_id, safe='-_.~')}"


def _text_of(answer: Answer, name: str) -> str:
    try:
        root = ET.fromstring(answer.body)  # noqa: S314 # the store's own words; expat bounds the expansion of entities
    except ET.ParseError:
        return ""
    return root.findtext(f"{{*}}{name}") or ""


def _crc32c_of(answer: Answer) -> int | None:
    for header in answer.headers.get_all("x-goog-hash") or ():
        for entry in header.split(","):
            name, _, value = entry.strip().partition("=")
            if name == "crc32c":
                return decode_crc(value)
    return None


def _cut(job: Job, what: str) -> StoreTransientError:
    place = job.session.place
    text = f"{place.where(job.key)}: the answer to {what} was cut"
    return StoreTransientError(text, uri=place.uri, key=place.relative(job.key))


# --- compose


@dataclass(frozen=True, slots=True)
class _Temporaries:
    """The keys below ``folder`` that one upload may have made."""

    folder: str
    names: list[str] = field(default_factory=list)

    def name(self, level: int, number: int) -> str:
        """A key to be made: its part, or the ``number``-th composition of that ``level``."""
        name = f"{self.folder}{level}-{number:05d}"
        self.names.append(name)
        return name


def _put_by_compose(job: Job, crc64: int | None) -> None:
    temporaries = _Temporaries(f"{job.incoming}{secrets.token_hex(16)}/")
    try:
        parts = _send_all(job, partial(_send_temporary, job, temporaries), crc64)
        whole = _whole(parts)
        parts = _reduce(job, temporaries, parts)
        _finish(job, whole, lambda: _compose(job, job.key, parts))
    finally:
        _remove_temporaries(job, temporaries)


def _send_temporary(job: Job, temporaries: _Temporaries, number: int, body: memoryview, crc: int) -> str:
    session, name = job.session, temporaries.name(0, number)
    answer = session.insert(name, body, crc, upload_of=job.key)
    if answer.status != _OK:
        raise session.refused(answer, job.key)
    check_stored(session, job.retry, name, session.inserted(answer, name), crc)
    return name


def _reduce(job: Job, temporaries: _Temporaries, parts: list[_Part]) -> list[_Part]:
    """Compose the parts to fewer, level by level, until one call can take them all."""
    level = 0

    def one(group: tuple[int, list[_Part]], failed: threading.Event) -> _Part:
        number, sources = group
        if len(sources) == 1:
            return sources[0]
        whole, name = _whole(sources), temporaries.name(level, number)
        stored = job.retry.run(partial(_compose, job, name, sources), abandoned=failed)
        check_stored(job.session, job.retry, name, stored, whole.crc32c)
        return replace(whole, name=name)

    while len(parts) > MOST_SOURCES:
        level += 1
        groups = [parts[first : first + MOST_SOURCES] for first in range(0, len(parts), MOST_SOURCES)]
        parts = in_window(one, list(enumerate(groups, 1)), job.connections)
    return parts


def _compose(job: Job, name: str, sources: Sequence[_Part]) -> Stored:
    session = job.session
    target = session.blob(name)
    target.content_type = "application/octet-stream"
    if name != job.key:
        target.metadata = {UPLOAD_OF: job.key}
    try:
        with session.errors(job.key):
            target.compose([session.blob(part.name) for part in sources], timeout=session.timeout, retry=None)
    except StoreNotFoundError as error:
        if not error.key:  # no bucket
            raise
        text = (
            f"{session.place.where(job.key)}: a part of it was removed before it was composed: put it again"
        )
        raise StoreTransientError(text, uri=error.uri, key=error.key) from error
    return session.of_blob(target, name)


def _remove_temporaries(job: Job, temporaries: _Temporaries) -> None:
    """As well as it can be done: the object is complete, or a failure is on its way that says more."""

    def remove(name: str, failed: threading.Event) -> None:
        job.retry.run(partial(job.session.remove, name), abandoned=failed)

    try:
        in_window(remove, sorted(set(temporaries.names)), CONTROL_CONNECTIONS)
    except StoreError as error:
        _log.warning(
            "temporary objects stay behind until abort_uploads, as they could not be removed: %s", error
        )


# --- what others left behind


@dataclass(frozen=True, slots=True)
class Orphan:
    """An unfinished upload: of ``key`` (the bucket's), begun at ``began`` by the store's clock; ``upload_id`` of the XML API, or the
    ``temporaries`` that are to be composed.
    """

    key: str
    began: float
    upload_id: str = ""
    temporaries: Sequence[str] = ()


def multipart_uploads(
    session: GCSSession, prefix: str, markers: Mapping[str, str]
) -> tuple[list[Orphan], Mapping[str, str]]:
    """A page of the unfinished multipart uploads below the bucket's ``prefix``, and the markers of the next one (empty: there is none).
    Not retried. An endpoint without the XML API has none, which is remembered.
    """
    query = "&".join(
        f"{name}={quote(value, safe='')}" for name, value in {"prefix": prefix, **markers}.items()
    )
    answer = session.request("GET", session.xml_target("", f"uploads&{query}"), prefix)
    refusal = Refusal.of(answer)
    try:
        root = ET.fromstring(answer.body) if answer.status == _OK else None  # noqa: S314 # see _text_of
    except ET.ParseError:
        root = None
    if root is None or not root.tag.endswith("ListMultipartUploadsResult"):
        if session.has_xml is None and (answer.status == _OK or refusal.speaks_no_xml):
            session.has_xml = False
            return [], {}
        raise session.refused(answer, prefix)
    session.has_xml = True
    found = [
        Orphan(
            key=entry.findtext("{*}Key") or "",
            began=datetime.fromisoformat(entry.findtext("{*}Initiated") or "").timestamp(),
            upload_id=entry.findtext("{*}UploadId") or "",
        )
        for entry in root.findall("{*}Upload")
    ]
    if root.findtext("{*}IsTruncated") != "true":
        return found, {}
    return found, {
        "key-marker": root.findtext("{*}NextKeyMarker") or "",
        "upload-id-marker": root.findtext("{*}NextUploadIdMarker") or "",
    }
