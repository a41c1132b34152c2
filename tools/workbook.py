"""The learner's working copy of the lessons: workbook/, made from notebooks/ with all answers cleared.

    python3 tools/workbook.py

`make lab` does this each time. What the learner changed is never overwritten: a lesson counts as changed when its
cells' sources are no longer those that were last written here (outputs, metadata and empty cells do not count).

    in workbook/             the course's lesson       what happens
    absent                   any                       written
    as written               changed                   written again
    changed by the learner   as before                 nothing
    changed by the learner   changed                   kept; the new one is put beside it as NN_name.updated.ipynb, once

Other files in workbook/ are left alone. workbook/.course/manifest.json remembers what was written. Standard library
only.
"""
import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def text(source):
    """A cell's source, which a notebook holds as a string or as a list of lines."""
    return source if isinstance(source, str) else "".join(source)


def fingerprint(path):
    """A hash of the types and sources of a notebook's cells that are not empty; None if it is no readable notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = [[cell["cell_type"], text(cell["source"])] for cell in cells]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sources = [[kind, source] for kind, source in sources if source.strip()]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def cleared(path):
    """The notebook's text without outputs, execution counts and widget state."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            cell["execution_count"] = None
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def write(path, content):
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(content, encoding="utf-8", newline="\n")
    os.replace(part, path)


def read_manifest(path):
    """What was written before, a dict from file names to {"written": hash, "offered": hash}; {} if that is lost."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {name: {key: str(value) for key, value in entry.items()} for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def free_name(target, offered):
    """Where the new lesson goes beside the learner's: NN_name.updated.ipynb, unless the learner changed that too."""
    path, number = target.with_name(f"{target.stem}.updated.ipynb"), 1
    while path.exists() and fingerprint(path) != offered:
        number += 1
        path = target.with_name(f"{target.stem}.updated-{number}.ipynb")
    return path


def update_lesson(original, target, entry):
    """Bring one lesson up to date, and its manifest entry in place; return a line for the learner, or None."""
    new, theirs = fingerprint(original), fingerprint(target)
    if new is None:
        raise ValueError(f"{original.name} is not a readable notebook")
    if not target.exists():
        message = f"{target.name} was missing and is back." if "written" in entry else None
        write(target, cleared(original))
        entry["written"] = new
        return message
    if theirs == new:
        entry["written"] = new
        return None
    if theirs is not None and theirs == entry.get("written"):
        write(target, cleared(original))
        entry["written"] = new
        return f"{target.name} was renewed: the course has a newer one, and you had not changed yours."
    if new in (entry.get("written"), entry.get("offered")):
        return None
    beside = free_name(target, entry.get("offered"))
    write(beside, cleared(original))
    entry["offered"] = new
    return f"{target.name} is yours and was kept; the course's newer one lies beside it: {beside.name}."


def update(notebooks, workbook):
    """Bring the whole working copy up to date; return the lines that the learner should read.

    notebooks, workbook: folders (Path). Raises ValueError for a lesson that is no notebook.
    """
    manifest_path = workbook / ".course" / "manifest.json"
    manifest = read_manifest(manifest_path)
    before = json.dumps(manifest, sort_keys=True)
    lines = []
    for original in sorted(notebooks.glob("*.ipynb")):
        line = update_lesson(original, workbook / original.name, manifest.setdefault(original.name, {}))
        if line:
            lines.append(line)
    if json.dumps(manifest, sort_keys=True) != before:
        write(manifest_path, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return lines


if __name__ == "__main__":
    for message in update(ROOT / "notebooks", ROOT / "workbook"):
        print(message)
    sys.exit(0)
