"""Configuration: keywords, environment and ``objckpt.toml`` become one frozen value.

Invariants: :func:`load` alone reads the environment and the file; a keyword beats ``OBJCKPT_<FIELD>``, which
beats the file's ``[checkpoint]`` table, which beats the default; a name that is not known is an error,
wherever it stands, and so is a value that cannot work. No value of ``storage_options`` and no password gets
into a ``repr`` or an error.

Called by ``checkpointer`` (and by the command line, for the same names mean the same there). Imports no
torch.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from objckpt.errors import ConfigError
from objckpt.manifest import Keep, KeepBest, KeepEvery, KeepFor, KeepLast

_MIB: Final = 1 << 20
_PREFIX: Final = "OBJCKPT_"
_FILE: Final = "objckpt.toml"
_FILE_VARIABLE: Final = _PREFIX + "CONFIG"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LONGEST: Final = 1e6  # days
_KEEP_WORDS: Final = (
    "must be a number of checkpoints of at least 2, or rules such as KeepLast(5), KeepEvery(steps=1000), KeepBest('loss', 3), "
    "KeepFor(days=7), in text last:5, every:1000, best:loss:3, best:accuracy:1:max, for:7"
)
_PASSWORD: Final = re.compile(r"(?<=://)([^/@:]*):.*@")


def redact(uri: str) -> str:
    """``uri`` fit for a log: a password before ``@`` is replaced by ``***``."""
    # Up to the last @, since the secret keys of S3 hold slashes: rather hide a part of the path than show one of a key.
    return _PASSWORD.sub(r"\1:***@", uri)


# A check takes a value of any type and returns it as its field holds it, or raises ValueError: what it must be.


def _uri(value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise ValueError("must be a URI such as s3://bucket/run or gs://bucket/run, or an absolute path")
    if text.startswith("/"):
        text = "file://" + text
    match = _SCHEME.fullmatch(text)
    if match is None:
        shown = "s3://bucket/run" if ":/" in text else redact("s3://" + text)
        raise ValueError(f"has no scheme; say {shown} for a bucket, or an absolute path for a directory")
    scheme, rest = match[1], match[2].rstrip("/")
    if not rest and scheme != "memory":
        raise ValueError(f"{text!r} names no place; say {scheme}://bucket/run, or a directory below /")
    if scheme == "file" and not rest.startswith("/"):
        raise ValueError(
            f"{redact(text)!r} is not absolute; say file:///{rest.lstrip('/')} or an absolute path"
        )
    return f"{scheme}://{rest}"


def _options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a table of names and values, such as {anon = true} (it is not shown here)")
    for name in ("part_size", "connections"):
        if name in value:
            raise ValueError(f"takes no {name}: say tuning=objckpt.Tuning(part_size=..., concurrency=...)")
    for name, entry in value.items():
        try:
            json.dumps(entry)
        except (TypeError, ValueError):
            raise ValueError(
                f"has {name!r} as a {type(entry).__name__}, which cannot be handed to the uploader, a process of its own: give plain "
                f"values, such as the path of a key file, or let the store's client find its credentials"
            ) from None
    return dict(value)


def _directory(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"must be the path of a directory, not {value!r}")
    return Path(value).expanduser().absolute()


def _integer(low: int, high: int | None = None, *, why: str = "") -> Callable[[object], int]:
    wanted = (
        f"must be an integer of at least {low}"
        if high is None
        else f"must be an integer from {low} to {high}"
    )

    def check(value: object) -> int:
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < low
            or (high is not None and value > high)
        ):
            raise ValueError(f"{wanted}, not {value!r}" + (f": {why}" if why else ""))
        return value

    return check


def _keep(value: object) -> tuple[Keep, ...]:
    """Rules from one number, one rule, several, or their text. The newest two always stay."""
    if isinstance(value, str):
        value = _rules_of(value)
    elif isinstance(value, bool):
        _integer(2)(value)
    elif isinstance(value, int):
        value = [KeepLast(value)]
    rules = list(value) if isinstance(value, list | tuple) else [value]
    if not rules:
        raise ValueError("has no rules: leave it out to keep all")
    checked = tuple(_checked_rule(rule) for rule in rules)
    return checked if any(isinstance(rule, KeepLast) for rule in checked) else (KeepLast(2), *checked)


def _checked_rule(rule: object) -> Keep:
    match rule:
        case KeepLast(1):
            raise ValueError(
                "1 is refused: if the only checkpoint turns out damaged, there is no older one to fall back to; "
                "say 2 or more, or leave it out to keep all"
            )
        case KeepLast(count):
            _integer(2)(count)
        case KeepEvery(steps):
            _integer(1)(steps)
        case KeepBest(metric, count, mode):
            _word(metric)
            _integer(1)(count)
            if mode not in ("min", "max"):
                raise ValueError(f"has a mode {mode!r}: say 'min' or 'max'")
        case KeepFor(days):
            if not isinstance(days, int | float) or isinstance(days, bool) or not 0 < days < _LONGEST:
                raise ValueError(f"must be a number of days above 0, not {days!r}")
        case _:
            raise ValueError(f"{_KEEP_WORDS}, not {rule!r}")
    return rule


def _rules_of(text: str) -> list[Keep]:
    """Rules from ``last:5, every:1000, best:loss:3:min, for:7``."""
    rules: list[Keep] = []
    for word in text.split(","):
        match [part.strip() for part in word.split(":")]:
            case [number] if number.isdecimal():
                rules.append(KeepLast(int(number)))
            case ["last", count] if count.isdecimal():
                rules.append(KeepLast(int(count)))
            case ["every", steps] if steps.isdecimal():
                rules.append(KeepEvery(int(steps)))
            case ["best", metric, count] if count.isdecimal():
                rules.append(KeepBest(metric, int(count)))
            case ["best", metric, count, "min" | "max" as mode] if count.isdecimal():
                rules.append(KeepBest(metric, int(count), "min" if mode == "min" else "max"))
            case ["for", days] if re.fullmatch(r"\d+(\.\d+)?", days):
                rules.append(KeepFor(float(days)))
            case _:
                raise ValueError(f"{_KEEP_WORDS}, not {word.strip()!r}")
    return rules


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"must be a number of seconds, not negative and not infinite; not {value!r}")
    return float(value)


def _positive_seconds(value: object) -> float:
    if (seconds := _seconds(value)) == 0:
        raise ValueError("must be more than 0 seconds: nothing can succeed in no time")
    return seconds


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")  # noqa: TRY004 # as _checked wants
    return value


def _when_full(value: object) -> Literal["wait", "skip"]:
    if value not in ("wait", "skip"):
        raise ValueError(f"must be 'wait' or 'skip', not {value!r}")
    return value


def _word(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"must be a printable text that is not empty, not {value!r}")
    return value.strip()


# How the text of a variable becomes a value; the check comes after.


def _int_text(text: str) -> object:
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def _float_text(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _bool_text(text: str) -> object:
    return {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }.get(text.lower(), text)


def _json_text(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not JSON: {error.msg} at character {error.pos} (it is not shown here)"
        ) from None


def _by(check: Callable[[object], object], text: Callable[[str], object] = str) -> dict[str, object]:
    """A field's metadata. Its default is not checked, so None may be the default of a field that refuses None."""
    return {"check": check, "text": text}


def _checked(name: str, source: str, value: object, check: Callable[[object], Any]) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {name} {error}") from None


@dataclass(frozen=True, slots=True)
class Tuning:
    """How fast, not what: sizes in bytes. Set by ``tuning=``, ``[checkpoint.tuning]`` or
    ``OBJCKPT_PART_SIZE`` and so on.

    ``part_size``: of one part of an upload and one range of a download (S3 and GCS allow 5 MiB to 5 GiB);
    ``concurrency``: parts on their way at one time on this node; each of its ranks (``LOCAL_WORLD_SIZE``)
    has its share of them, and at least one.
    """

    part_size: int = field(
        default=16 * _MIB,
        metadata=_by(
            _integer(5 * _MIB, 5 << 30, why="S3's and GCS's limits for a part, in bytes"), _int_text
        ),
    )
    concurrency: int = field(default=16, metadata=_by(_integer(1, 256), _int_text))

    def __post_init__(self) -> None:
        for entry in fields(self):
            _checked(
                entry.name, f"Tuning({entry.name}=...)", getattr(self, entry.name), entry.metadata["check"]
            )


def _tuning(value: object) -> Tuning:
    if not isinstance(value, Tuning):
        raise ValueError(f"must be an objckpt.Tuning(...), not {value!r}")  # noqa: TRY004 # as _checked wants
    return value


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """What a :class:`Checkpointer` was told. Made by :func:`load`, which checks every field.

    Where: ``uri`` (without a trailing slash; an absolute path has become ``file://``), ``storage_options``
    (its client's names), ``cache`` (directory of the local tier; None: the first place with room). What:
    ``interval`` (steps between two saves; None: none but the last and the preempted), ``keep`` (which
    checkpoints: a number of the newest ones, or rules, of which any keeps one; nothing said: all), ``slots``
    (files of the local tier per rank), ``when_full`` (no slot is free: ``wait`` for one
    or ``skip`` the save), ``rng`` (save and restore the random states), ``max_failed_saves`` (in a row,
    before training stops). How long, in seconds: ``adopt_timeout`` (a start gives up an earlier attempt's live
    uploader on this node that has not got on for so long), ``agree_timeout`` (``save`` waits for the other ranks), ``save_timeout`` (a
    save not committed by then has failed), ``linger`` (an uploader outlives its trainer), ``exit_timeout``
    (leaving the block on an exception). Who: ``launch`` (by hand, else from the scheduler: :func:`launch_id`;
    None: the caller makes a random one), ``takeover`` (the attempt that this start supersedes).
    """

    uri: str = field(metadata=_by(_uri))
    storage_options: Mapping[str, Any] = field(default_factory=dict, metadata=_by(_options, _json_text))
    cache: Path | None = field(default=None, metadata=_by(_directory))
    interval: int | None = field(default=None, metadata=_by(_integer(1), _int_text))
    keep: tuple[Keep, ...] = field(default=(), metadata=_by(_keep, _int_text))
    slots: int = field(
        default=2,
        metadata=_by(
            _integer(2, why="the newest committed one serves a restart on this node, another is in flight"),
            _int_text,
        ),
    )
    max_failed_saves: int = field(default=3, metadata=_by(_integer(1), _int_text))
    adopt_timeout: float = field(default=60.0, metadata=_by(_seconds, _float_text))
    linger: float = field(default=900.0, metadata=_by(_seconds, _float_text))
    exit_timeout: float = field(default=30.0, metadata=_by(_seconds, _float_text))
    save_timeout: float = field(default=1800.0, metadata=_by(_positive_seconds, _float_text))
    agree_timeout: float = field(default=600.0, metadata=_by(_positive_seconds, _float_text))
    when_full: Literal["wait", "skip"] = field(default="wait", metadata=_by(_when_full))
    launch: str | None = field(default=None, metadata=_by(_word))
    takeover: int | None = field(default=None, metadata=_by(_integer(0), _int_text))
    rng: bool = field(default=True, metadata=_by(_boolean, _bool_text))
    tuning: Tuning = field(default=Tuning(), metadata=_by(_tuning))

    def __repr__(self) -> str:
        shown = {entry.name: repr(getattr(self, entry.name)) for entry in fields(self)}
        shown["uri"] = repr(redact(self.uri))
        shown["storage_options"] = "{" + ", ".join(f"{name!r}: ***" for name in self.storage_options) + "}"
        return "Config(" + ", ".join(f"{name}={text}" for name, text in shown.items()) + ")"


_CONFIG: Final = {entry.name: entry.metadata for entry in fields(Config)}
_TUNING: Final = {entry.name: entry.metadata for entry in fields(Tuning)}
#: The fields that a variable can hold: all but ``tuning``, whose own fields stand for it.
_TEXTS: Final = {name: metadata["text"] for name, metadata in (_CONFIG | _TUNING).items() if name != "tuning"}


def load(**keywords: Any) -> Config:
    """The configuration. A keyword that is None was not said; ``storage_options`` is taken whole from the
    first place that has it.

    The file is the one that ``OBJCKPT_CONFIG`` names, else ``objckpt.toml`` in the working directory if there
    is one. An empty variable was not said. :class:`ConfigError` names the place of the unknown name or wrong
    value, and what would be right.
    """
    _refuse_unknown(keywords, _CONFIG, "keyword {}")
    said = dict(_file(os.environ))
    said |= _environment(os.environ)
    said |= {name: (f"keyword {name}", value) for name, value in keywords.items() if value is not None}
    values: dict[str, Any] = {}
    for name, (source, value) in said.items():
        if name in _CONFIG:
            values[name] = _checked(name, source, value, _CONFIG[name]["check"])
    if "tuning" not in values:
        parts = {
            name: _checked(name, *said[name], _TUNING[name]["check"]) for name in _TUNING if name in said
        }
        values["tuning"] = Tuning(**parts)
    if "uri" not in values:
        raise ConfigError(
            "no URI was given: say Checkpointer('s3://bucket/run'), set OBJCKPT_URI, "
            f'or write uri = "s3://bucket/run" under [checkpoint] in {_FILE}'
        )
    share = max(1, values["tuning"].concurrency // _local_world_size(os.environ))
    values["tuning"] = replace(values["tuning"], concurrency=share)
    values.setdefault("launch", launch_id(os.environ))
    return Config(**values)


def _local_world_size(environ: Mapping[str, str]) -> int:
    """Ranks on this node, as torchrun tells them; 1 if nothing does."""
    text = environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdecimal() else 1


def launch_id(environ: Mapping[str, str]) -> str | None:
    """What stays the same when a scheduler restarts this job, and differs for any other job. None: nothing
    says.

    ``OBJCKPT_LAUNCH`` was set by hand and so comes first: on Kubernetes put the UID of the *controller* (Job,
    JobSet, PyTorchJob) there, never the pod's, which changes with each restart. Then Slurm's cluster and job
    id, which a requeue keeps; then torchelastic's run id, unless torchrun was given none.
    """
    if by_hand := environ.get(_PREFIX + "LAUNCH", "").strip():
        return by_hand
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm:{environ.get('SLURM_CLUSTER_NAME', '')}:{job}"
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    return f"torchelastic:{run}" if run not in ("", "none") else None


def _refuse_unknown(names: Iterable[str], known: Iterable[str], place: str) -> None:
    """``place`` shows where a name stands, with ``{}`` for the name."""
    known = list(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown {place.replace('{}', name)}; the nearest known one is {place.replace('{}', nearest)}"
            )


def _environment(environ: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    texts = {name.removeprefix(_PREFIX): text for name, text in environ.items() if name.startswith(_PREFIX)}
    known = {name.upper(): name for name in _TEXTS}
    _refuse_unknown(texts, [*known, "CONFIG"], "variable " + _PREFIX + "{}")
    said: dict[str, tuple[str, object]] = {}
    for upper, text in texts.items():
        if upper in known and text.strip():
            name, source = known[upper], _PREFIX + upper
            said[name] = source, _checked(name, source, text.strip(), _TEXTS[name])
    return said


def _file(environ: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    named = environ.get(_FILE_VARIABLE, "").strip()
    path = Path(named or _FILE)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if named:
            raise ConfigError(
                f"{_FILE_VARIABLE} names {named}, which does not exist: mend the path or unset it"
            ) from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        document = tomllib.loads(content.decode())
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    _refuse_unknown(document, ["checkpoint"], f"table [{{}}] in {path}")
    table = _table(document.get("checkpoint", {}), "checkpoint", path)
    _refuse_unknown(table, _CONFIG, f"key {{}} under [checkpoint] in {path}")
    tuning = _table(table.pop("tuning", {}), "checkpoint.tuning", path)
    _refuse_unknown(tuning, _TUNING, f"key {{}} under [checkpoint.tuning] in {path}")
    return {name: (str(path), value) for name, value in (table | tuning).items()}


def _table(value: object, name: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {name} must be a table, written [{name}]")
    return dict(value)
