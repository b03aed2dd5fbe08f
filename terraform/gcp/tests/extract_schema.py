"""Write ``schema.json``: what the Google provider knows of the types that this module uses.

The provider itself cannot be had everywhere, but a package on PyPI carries its whole schema (49 MB). From the root of the repository:

    pip download --no-deps -d /tmp/schema cdktf-cdktf-provider-google==16.12.1
    python terraform/gcp/tests/extract_schema.py /tmp/schema/*.whl

Called by hand, when the module uses a new type or is to allow a newer provider. ``tests/test_terraform_gcp.py`` reads the result.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

_MODULE = Path(__file__).parents[1]
_SCOPE = "@cdktf/provider-google"


def _types(wheel: Path) -> tuple[dict[str, Any], str]:
    """All types of the package, and the provider's version that they were made from."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".jsii.tgz"))
        packed = archive.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as package:
        found = {name: package.extractfile(f"package/{name}") for name in (".jsii", "package.json")}
        described, manifest = (json.load(file) for file in found.values() if file is not None)
    return described["types"], manifest["cdktf"]["provider"]["version"]


def _inner(kind: dict[str, Any]) -> str | None:
    """The type of a nested block, alone or in a list, which stands in a union with a type of the generator's own."""
    if "fqn" in kind:
        return kind["fqn"] if kind["fqn"].startswith(_SCOPE) else None
    if "collection" in kind:
        return _inner(kind["collection"]["elementtype"])
    inner = [_inner(one) for one in kind.get("union", {}).get("types", [])]
    return next((name for name in inner if name), None)


def _arguments(types: dict[str, Any], name: str) -> dict[str, Any]:
    """By name in camelCase: whether it is required, and what a block may hold."""
    found = {}
    for entry in sorted(types[name].get("properties", []), key=lambda entry: entry["name"]):
        if "overrides" in entry:  # a meta-argument of Terraform
            continue
        block = _inner(entry["type"])
        found[entry["name"]] = {"required": not entry.get("optional", False)} | (
            {"block": _arguments(types, block)} if block else {}
        )
    return found


def _described(types: dict[str, Any], name: str) -> dict[str, Any]:
    camel = re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)
    pascal = camel[0].upper() + camel[1:]
    readable = (entry["name"] for entry in types[f"{_SCOPE}.{camel}.{pascal}"]["properties"])
    return {
        "arguments": _arguments(types, f"{_SCOPE}.{camel}.{pascal}Config"),
        "attributes": sorted(
            name for name in readable if not name.endswith("Input") and name != "tfResourceType"
        ),
    }


def main() -> None:
    """Read the wheel that is named on the command line."""
    wheel = Path(sys.argv[1])
    types, version = _types(wheel)
    text = "".join(path.read_text() for path in sorted(_MODULE.glob("*.tf")))
    used = sorted(set(re.findall(r'^(resource|data) "google_(\w+)"', text, re.MULTILINE)))
    document = {
        "provider": version,
        "source": "-".join(wheel.name.split("-")[:2]),
        "types": {
            f"{kind} google_{name}": _described(types, name if kind == "resource" else f"data_google_{name}")
            for kind, name in used
        },
    }
    target = Path(__file__).with_name("schema.json")
    target.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(f"{target}: {len(used)} types of the provider {version}\n")


main()
