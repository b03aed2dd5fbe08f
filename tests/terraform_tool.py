"""Terraform for the tests: where it and its AWS provider are, and a copy of ``terraform/`` to run it in.

Nothing is written into the source tree: Terraform leaves its lock file beside the module that it initializes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "terraform"

#: Folders at the top that hold no packages, or too many.
_NOT_SEARCHED = {"/proc", "/sys", "/dev", "/run", "/tmp"}


class MissingError(Exception):
    """Terraform, or a provider for it, is not on this machine."""


def _configured():
    """Folders that Terraform itself would look into, as its configuration and its documentation name them."""
    if said := os.environ.get("TF_PLUGIN_MIRROR"):
        yield Path(said)
    with contextlib.suppress(OSError):
        text = Path(os.environ.get("TF_CLI_CONFIG_FILE") or "~/.terraformrc").expanduser().read_text()
        for block in re.findall(r"filesystem_mirror\s*{([^}]*)}", text):
            for path in re.findall(r'path\s*=\s*"([^"]+)"', block):
                yield Path(path).expanduser()
    if said := os.environ.get("TF_PLUGIN_CACHE_DIR"):
        yield Path(said)
    home = Path.home()
    yield home / ".terraform.d/plugins"
    yield home / ".local/share/terraform/plugins"
    yield Path("/usr/local/share/terraform/plugins")
    yield Path("/usr/share/terraform/plugins")


def _provider_folders(mirror):
    """``<mirror>/<registry's host>/hashicorp/aws``, where there is a version in it."""
    with contextlib.suppress(OSError):
        yield from (found for found in mirror.glob("*/hashicorp/aws") if any(found.iterdir()))


@functools.cache
def mirror():
    """A folder of providers with AWS's among them; None: there is none, so that Terraform has to ask its registry."""
    for place in _configured():
        if any(_provider_folders(place)):
            return place
    for top in Path("/").iterdir():
        if str(top) in _NOT_SEARCHED or top.is_symlink():
            continue
        with contextlib.suppress(OSError):
            for place in sorted(top.iterdir()):
                if place.is_dir() and any(_provider_folders(place)):
                    return place
    return None


class Terraform:
    """``terraform`` in one folder. Raises with its output if it ends with another code than 0."""

    def __init__(self, folder):
        self.folder = Path(folder)

    @staticmethod
    def program():
        found = shutil.which("terraform")
        if found is None:
            raise MissingError("terraform is not installed")
        return found

    @staticmethod
    def environment():
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "TF_VAR_"))}
        if not Path(kept.get("TF_CLI_CONFIG_FILE", os.devnull)).exists():
            kept["TF_CLI_CONFIG_FILE"] = os.devnull
        # It would ask for its own news, and what it talks to here is on loopback. The provider holds 600 MB: with Go's default it
        # spends a third of its time on collecting garbage.
        own = {
            "CHECKPOINT_DISABLE": "1",
            "TF_IN_AUTOMATION": "1",
            "TF_INPUT": "0",
            "NO_PROXY": "*",
            "GOGC": "400",
        }
        return kept | own

    def command(self, verb, *arguments):
        return [self.program(), verb, "-no-color", *arguments]

    def __call__(self, verb, *arguments, codes=(0,)):
        command = self.command(verb, *arguments)
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode in codes, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def init(self):
        """Once per folder. :class:`MissingError` if there is no mirror and the registry cannot be reached either."""
        if (self.folder / ".terraform").exists():
            return self
        place = mirror()
        try:
            self("init", "-backend=false", *([f"-plugin-dir={place}"] if place else []))
        except AssertionError as error:
            if place is None:
                raise MissingError(
                    f"no mirror of providers was found (TF_PLUGIN_MIRROR names one): {error}"
                ) from error
            raise
        return self

    def start(self, verb, *arguments, log):
        """The same in the background, its output in the file ``log``."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command(verb, *arguments),
                cwd=self.folder,
                env=self.environment(),
                stdout=output,
                stderr=output,
            )

    def show(self):
        """The state, as Terraform documents its JSON."""
        return json.loads(self("show", "-json"))


def copy(folder):
    """A copy of ``terraform/`` in ``folder``, without what an earlier run may have left."""
    shutil.copytree(
        SOURCE, folder, ignore=shutil.ignore_patterns(".terraform", ".terraform.lock.hcl", "*.tfstate*")
    )
    return folder
