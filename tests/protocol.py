"""What the tests of the protocol share: saves made without tensors, and stores that behave oddly."""

from __future__ import annotations

from objckpt.commit import Outcome, Run
from objckpt.manifest import (
    MANIFEST_PREFIX,
    Attempt,
    Policy,
    Save,
    Step,
    decode_version,
    version_key,
    version_of,
)
from objckpt.retention import retain
from objckpt.store import read_all
from objckpt.testing.worlds import durable

ALL = Policy()


def S(attempt, step):
    return Save(Attempt(attempt), Step(step))


def run_of(store):
    return Run(store, retain=retain, pause=lambda _: None)


def started(store, launch="one", world_size=1, policy=ALL, **more):
    return run_of(store).start(launch=launch, world_size=world_size, policy=policy, **more)


def saved(store, version, step, *, commit=True, world_size=None, **more):
    """A save of every rank; committed, unless only its records are wanted."""
    world_size = world_size or version.world_size
    save = Save(version.attempt, Step(step))
    for rank in range(world_size):
        durable(store, version.run, save, rank, world_size, **more)
    if commit:
        assert run_of(store).commit(save, world_size) is Outcome.COMMITTED
    return save


def newest(store):
    return run_of(store).existing()


def history(store):
    """All versions there are, by number."""
    numbers = [version_of(o.key) for o in store.list(MANIFEST_PREFIX)]
    return [decode_version(read_all(store, version_key(n)), n) for n in numbers]


class Odd:
    """A store that behaves oddly in the verbs that a test replaces."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)
