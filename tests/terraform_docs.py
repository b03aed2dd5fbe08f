"""The tables of a module's README, in the form of terraform-docs, made from its ``.tf`` files.

``python tests/terraform_docs.py`` writes them between the markers of each README; the tests compare.
"""

from __future__ import annotations

import json
from pathlib import Path

import hcl2

TERRAFORM = Path(__file__).parents[1] / "terraform"
MODULES = tuple(TERRAFORM / name for name in ("aws", "gcp"))
BEGIN, END = "<!-- BEGIN_TF_DOCS -->\n", "<!-- END_TF_DOCS -->\n"


def plain(value):
    """What python-hcl2 read, without the quotes that it keeps around strings and labels."""
    if isinstance(value, dict):
        return {
            plain(name): plain(inner)
            for name, inner in value.items()
            if name not in {"__is_block__", "__comments__"}
        }
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return json.loads(value) if "${" not in value else value[1:-1]
    return value


def parsed(module):
    """All ``.tf`` files of a folder as one document: for each kind of block a list of them."""
    document = {}
    for path in sorted(module.glob("*.tf")):
        for kind, blocks in plain(hcl2.loads(path.read_text())).items():
            document.setdefault(kind, []).extend(blocks)
    return document


def entries(document, kind):
    """Blocks with one label, by it, sorted."""
    return dict(sorted((name, body) for block in document.get(kind, []) for name, body in block.items()))


def resources(document, kind):
    """``resource`` or ``data`` blocks as (type, name, body), sorted."""
    return sorted(
        (of_type, name, body)
        for block in document.get(kind, [])
        for of_type, named in block.items()
        for name, body in named.items()
    )


def _table(head, rows):
    lines = [head, ["-" * (len(name) + 2) for name in head]]
    text = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [text[0], "|" + "|".join(lines[1]) + "|", *text[1:]]


def _code(value):
    return f"`{value}`".replace("|", "\\|")


def _type(text):
    """``string`` of ``${string}``, with a blank after each comma and inside braces."""
    text = text.removeprefix("${").removesuffix("}") if text.startswith("${") else text
    return text.replace("{", "{ ").replace("}", " }")


def section(module):
    """What stands between the markers."""
    document = parsed(module)
    (settings,) = document["terraform"]
    (providers,) = settings["required_providers"]
    versions = [["terraform", settings["required_version"]]]
    versions += [[name, said["version"]] for name, said in sorted(providers.items())]
    inputs = [
        [
            name,
            body["description"],
            _code(_type(body["type"])),
            _code(json.dumps(body["default"])) if "default" in body else "n/a",
            "no" if "default" in body else "yes",
        ]
        for name, body in entries(document, "variable").items()
    ]
    lines = ["## Requirements", "", *_table(["Name", "Version"], versions), ""]
    lines += ["## Providers", "", *_table(["Name", "Version"], versions[1:]), ""]
    lines += ["## Modules", "", "No modules.", "", "## Resources", ""]
    lines += _table(
        ["Name", "Type"],
        [[f"{of_type}.{name}", "resource"] for of_type, name, _ in resources(document, "resource")]
        + [[f"{of_type}.{name}", "data source"] for of_type, name, _ in resources(document, "data")],
    )
    lines += ["", "## Inputs", "", *_table(["Name", "Description", "Type", "Default", "Required"], inputs)]
    outputs = [[name, body["description"]] for name, body in entries(document, "output").items()]
    lines += ["", "## Outputs", "", *_table(["Name", "Description"], outputs)]
    return "\n".join(lines) + "\n"


def written(module):
    """What a README has between its markers now, and the text before and after."""
    before, _, rest = (module / "README.md").read_text().partition(BEGIN)
    between, _, after = rest.partition(END)
    return before, between, after


if __name__ == "__main__":
    for folder in MODULES:
        before, _, after = written(folder)
        (folder / "README.md").write_text(before + BEGIN + section(folder) + END + after)
