"""Every error that objckpt raises on purpose, grouped by what a handler does.

Invariants: each error derives from :class:`ObjckptError`; each pickles (ranks and processes pass them on); each message
says what happened, to which object, and what to do next. All layers raise from here; nothing here imports another layer.

::

    ObjckptError
    ├─ CheckpointNotFoundError  (FileNotFoundError)  no such step, none complete: start fresh, or mend the URI
    ├─ FencedError                                   a newer attempt has taken over: stop
    ├─ CorruptCheckpointError                        checksum, size or header is wrong
    │  └─ FormatVersionError                         written by a newer objckpt: upgrade
    ├─ StateMismatchError       (ValueError)         names, shapes or dtypes differ; lists all of them
    ├─ ConfigError              (ValueError)         a keyword, variable or file says what cannot be done
    ├─ SaveFailedError                               not committed by the deadline; training can go on
    ├─ SpoolError               (OSError)            the local tier has no room, or is not fit to hold a slot
    ├─ WorldError               (TimeoutError)       ranks did not come to an agreement; the message names them
    ├─ CommitUnknownError                            create unanswered and read-back failed: do not guess
    └─ StoreError               (OSError)            carries uri, key, attempts
       ├─ StoreNotFoundError    (FileNotFoundError)  no such bucket, key or upload
       ├─ StorePermissionError  (PermissionError)    the credentials do not allow it
       ├─ StoreTransientError                        throttled, reset or timed out until the deadline
       └─ StoreUnsuitableError                       cannot create atomically: refused for writing
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final

#: A process that was fenced ends with this code (``EX_NOPERM``), so that a supervisor can tell it from a crash.
FENCED_EXIT_CODE: Final = 77
#: A process that was preempted ends with this code (``EX_TEMPFAIL``): run it again.
PREEMPTED_EXIT_CODE: Final = 75


class ObjckptError(Exception):
    """Root of all errors of objckpt."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by text and attributes: subclasses may take keywords in ``__init__``."""
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    cls: type[ObjckptError], args: tuple[object, ...], attributes: dict[str, object]
) -> ObjckptError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class CheckpointNotFoundError(ObjckptError, FileNotFoundError):
    """There is no such run, no such step, or no complete checkpoint."""


class FencedError(ObjckptError):
    """A newer attempt has taken the run over (or this launch was superseded before). Stop; do not start again as is."""

    exit_code: Final = FENCED_EXIT_CODE


class CorruptCheckpointError(ObjckptError):
    """A checksum, a size or a header is wrong. Nothing of the object was used."""


class FormatVersionError(CorruptCheckpointError):
    """The object was written by a newer objckpt: upgrade objckpt to read it."""


class StateMismatchError(ObjckptError, ValueError):
    """Names, shapes or dtypes differ between the state and the checkpoint, or a value cannot be stored."""


class ConfigError(ObjckptError, ValueError):
    """A keyword, an environment variable or ``objckpt.toml`` asks for what cannot be done."""


class SaveFailedError(ObjckptError):
    """A save was not committed. It may still become complete, never half; training can go on."""


class SpoolError(ObjckptError, OSError):
    """The local tier has no room for the slots, or its file system is not fit to hold them."""


class WorldError(ObjckptError, TimeoutError):
    """Some ranks did not come to an agreement in time. The message names them; a later agreement may succeed."""


class CommitUnknownError(ObjckptError):
    """A ``create`` had no answer and the read-back failed too: it is not known whether the object exists."""


class StoreError(ObjckptError, OSError):
    """A request to the store failed.

    ``uri`` is the store's (without secrets), ``key`` the object's ("" for the whole store), ``attempts`` how often it was tried.
    """

    def __init__(self, message: str, *, uri: str = "", key: str = "", attempts: int = 1) -> None:
        super().__init__(message)
        self.uri = uri
        self.key = key
        self.attempts = attempts


class StoreNotFoundError(StoreError, FileNotFoundError):
    """No such bucket, key or upload."""


class StorePermissionError(StoreError, PermissionError):
    """The credentials do not allow it."""


class StoreTransientError(StoreError):
    """Throttled, reset, or timed out until the deadline: it may work later."""


class StoreUnsuitableError(StoreError):
    """The store cannot create an object atomically, so it may be read but not written."""


def named(name: str, message: str) -> ObjckptError:
    """The error of that class name, as another rank or process tells of it; :class:`ObjckptError` for any name that is none of ours."""
    kind = globals().get(name)
    return (
        kind(message)
        if isinstance(kind, type) and issubclass(kind, ObjckptError)
        else ObjckptError(f"{name}: {message}")
    )


def end_fenced_processes_with_their_code() -> None:
    """From now on, an uncaught :class:`FencedError` ends this process with :data:`FENCED_EXIT_CODE`, after its traceback was printed.

    A supervisor that restarts what failed would otherwise restart it for ever. Python offers no way to choose the code of an uncaught
    exception but to end the process there and then.
    """
    if _end_if_fenced not in _hooks:
        _hooks[_end_if_fenced] = sys.excepthook
        sys.excepthook = _end_if_fenced


def _end_if_fenced(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _hooks[_end_if_fenced](kind, error, trace)
    if isinstance(error, FencedError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FENCED_EXIT_CODE)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
#: Our hook and the one that was there before it.
_hooks: dict[_Hook, _Hook] = {}
