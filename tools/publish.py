"""Set the course's public address in the one place that holds it, and stamp everything that shows it.

    python tools/publish.py REPO=owner/name TAG=v1      published: setup cells install from there, badges lead there
    python tools/publish.py REPO= TAG=                  not published

REPO and TAG may also be environment variables. The address is kept in pyproject.toml, [tool.posenc.publish]; setup
cells, navigation and README's badges are stamped from it (tools/notebooks.py). Outputs are not touched.
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import notebooks

REPOSITORY_SHAPE = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}"
TAG_SHAPE = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"


def check_address(repository, tag):
    """Raise ValueError unless both are empty, or `repository` is "owner/name" and `tag` a plain tag name."""
    if bool(repository) != bool(tag):
        raise ValueError("REPO and TAG belong together: give both, or leave both empty to un-publish")
    if repository and not re.fullmatch(REPOSITORY_SHAPE, repository):
        raise ValueError(f"REPO must look like owner/name, without https:// and .git, not {repository!r}")
    if repository.endswith(".git"):
        raise ValueError(f"REPO must not end in .git: {repository!r}")
    if tag and (not re.fullmatch(TAG_SHAPE, tag) or ".." in tag):
        raise ValueError(f"TAG must be a tag name of letters, digits, dots and dashes such as v1.0, not {tag!r}")


def publish(repository, tag, root=notebooks.ROOT):
    """Write the address into pyproject.toml and stamp from it; return the files that changed.

    Raises ValueError for a badly shaped address, before anything is written.
    """
    check_address(repository, tag)
    path = root / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    section = r"(\[tool\.posenc\.publish\]\n)repository = \"[^\"\n]*\"\ntag = \"[^\"\n]*\"\n"
    stamped, found = re.subn(section, rf'\g<1>repository = "{repository}"\ntag = "{tag}"\n', text)
    if found != 1:
        raise ValueError("pyproject.toml needs one [tool.posenc.publish] with the lines repository and tag")
    if stamped != text:
        path.write_text(stamped, encoding="utf-8", newline="\n")
    return ([path] if stamped != text else []) + notebooks.stamp(root)


def main(arguments=None):
    given = dict(os.environ)
    for argument in sys.argv[1:] if arguments is None else arguments:
        key, equals, value = argument.partition("=")
        if key not in ("REPO", "TAG") or not equals:
            print(f"publish takes REPO=owner/name TAG=v1, not {argument!r}", file=sys.stderr)
            return 2
        given[key] = value
    if "REPO" not in given or "TAG" not in given:
        print("publish needs REPO=owner/name and TAG=v1 (both empty: un-publish)", file=sys.stderr)
        return 2
    try:
        changed = publish(given["REPO"], given["TAG"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    state = f"published as {given['REPO']} at {given['TAG']}" if given["REPO"] else "not published"
    print(f"The course is {state}; {len(changed)} files changed. Commit them, then tag that commit.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
