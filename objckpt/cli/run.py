"""The run that a command looks at: opened, and in words of JSON.

Invariants: it is found as a job finds it (argument, environment, file); what a version says has the same names in every command.

Called by the commands beside this file.
"""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

from objckpt import config
from objckpt.commit import Run
from objckpt.errors import ConfigError, ObjckptError
from objckpt.manifest import Entry, Save, Version, encode_policy
from objckpt.retention import line, retain
from objckpt.store import open_store

#: What a command found: JSON, printed as it is by ``--json``.
Document: TypeAlias = "dict[str, Any]"


def open_run(said: argparse.Namespace) -> tuple[Run, Version]:
    """The run and its newest version. :class:`CheckpointNotFoundError` if there is none."""
    where = config.load(uri=said.uri, storage_options=said.storage_options)
    try:
        store = open_store(where.uri, **where.storage_options)
    except ObjckptError:
        raise
    except (TypeError, ValueError) as error:  # from the client, about a value that was typed here
        raise ConfigError(
            f"{config.redact(where.uri)}: the store's client refuses one of the storage options {', '.join(where.storage_options)}: "
            f"a name or a kind of value is wrong"
        ) from error
    run = Run(store, retain=retain)
    return run, run.existing()


def run_document(run: Run, version: Version) -> Document:
    """What the newest version says of the run itself."""
    return {
        "uri": run.store.uri,
        "run": version.run,
        "version": version.number,
        "change": version.change,
        "attempt": version.attempt,
        "launch": version.launch,
        "finished": version.launch is None,
        "world_size": version.world_size,
        "policy": encode_policy(version.policy),
        "head": save_document(version.head),
    }


def checkpoint_document(version: Version, entry: Entry) -> Document:
    """A listed checkpoint."""
    return {
        "step": entry.save.step,
        "attempt": entry.save.attempt,
        "world_size": entry.world_size,
        "nbytes": entry.nbytes,
        "created_at": entry.created_at,
        "parent": save_document(entry.parent),
        "head": entry.save == version.head,
        "aside": entry.save not in line(version.head, version.kept),
        "pinned": entry.pinned,
        "metrics": dict(entry.metrics),
        "bases": [save_document(base) for base in entry.bases],
    }


def save_document(save: Save | None) -> Document | None:
    """A save by name."""
    return None if save is None else {"attempt": save.attempt, "step": save.step}
