"""Execute, clean and stamp the lessons.

    python tools/notebooks.py                        every notebook: execute, clean, stamp
    python tools/notebooks.py 03_sinusoidal          only this one is executed; all are stamped
    python tools/notebooks.py --stamp-only           setup cells, navigation and README only; nothing is executed
    python tools/notebooks.py --check                exit 1 if stamping would change anything; writes nothing
    python tools/notebooks.py --from-py draft.py 03_sinusoidal     take the cells from a "py:percent" file first
    python tools/notebooks.py --to-py 03_sinusoidal draft.py       write the cells as a "py:percent" file

Running it twice changes nothing the second time. Stamped are: the cell tagged `setup`, the two cells tagged `nav`
(missing ones are inserted), and in README.md what stands between `<!-- lessons:start -->` and `<!-- lessons:end -->`
and between `<!-- badges:start -->` and `<!-- badges:end -->`.
"""

import argparse
import difflib
import hashlib
import os
import re
import sys
import time
import tomllib
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parent))
import setup_cell

ROOT = Path(__file__).resolve().parents[1]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
FOLDED = {"jupyter": {"source_hidden": True}}
COLAB = "https://colab.research.google.com"

# Every lesson of the plan, in order; README lists those without a notebook as "in preparation".
LESSONS = {
    "00_start_here": "How does the course work, and is my environment ready?",
    "01_permutation": "Why can attention not see order?",
    "02_counting": "Why not simply 1, 2, 3, ...?",
    "03_sinusoidal": "What exactly is the sinusoidal encoding?",
    "04_uniqueness": "How can periodic functions label positions uniquely?",
    "05_rotation": "How does an absolute encoding carry relative position?",
    "06_rope": "What if we rotate queries and keys instead of adding?",
    "07_longer_context": "How is a RoPE model stretched beyond its training length?",
    "08_relative_vectors": "What if attention is told the offset directly?",
    "09_relative_bias": "How far can the relative term be simplified?",
    "10_absolute_family": "What if the encoding is learned, continuous, complex, or shifted?",
    "11_beyond_counting": 'What if "position" is context, a tree, a graph, a grid, or only some tokens?',
    "12_experiment": "Which one should I use? Train them, and look beyond the training length",
    "13_myths": "What does the field believe, and which of it is true?",
}


def paths(root=ROOT):
    """The notebooks that exist, in order."""
    return sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def read(path):
    """The notebook at `path`, as nbformat 4.5."""
    return nbformat.read(path, as_version=4)


def write(nb, path):
    """Write the notebook if that changes the file; return whether it did."""
    nb.nbformat, nb.nbformat_minor = 4, 5
    text = nbformat.writes(nb).rstrip("\n") + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8", newline="\n")
    return True


def tags(cell):
    """The cell's tags, a set."""
    return set(cell.metadata.get("tags", []))


def tagged(nb, tag):
    """The cells that carry a tag, in order."""
    return [cell for cell in nb.cells if tag in tags(cell)]


def publication(root=ROOT):
    """(repository, tag) from pyproject.toml's [tool.posenc.publish]; ("", "") while nothing is published."""
    publish = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["posenc"]["publish"]
    return publish["repository"], publish["tag"]


def title(nb):
    """The text of the first heading: "03 · The sinusoidal encoding"."""
    heading = re.search(r"^# (.+)$", nb.cells[0].source, re.MULTILINE) if nb.cells else None
    if not heading:
        raise ValueError("the first cell must be a markdown cell that begins with '# NN · Title'")
    return heading.group(1).strip()


def colab_badge(name, repository, tag):
    """A markdown badge that opens the published notebook in Colab."""
    address = f"{COLAB}/github/{repository}/blob/{tag}/notebooks/{name}.ipynb"
    return f"[![Open this lesson in Google Colab]({COLAB}/assets/colab-badge.svg)]({address})"


def binder_badge(name, repository, tag):
    """A markdown badge that opens the published course on Binder at one notebook."""
    address = f"https://mybinder.org/v2/gh/{repository}/{tag}?urlpath=lab/tree/notebooks/{name}.ipynb"
    return f"[![Open the course on Binder, free of charge](https://mybinder.org/badge_logo.svg)]({address})"


def navigation(name, titles, repository="", tag=""):
    """The source of a lesson's `nav` cells.

    titles: dict from the names of the notebooks that exist to their titles, in order. Raises ValueError for a name
    that is not in it.
    """
    names = list(titles)
    here = names.index(name)
    links = []
    if here > 0:
        links.append(("Previous", names[here - 1]))
    if here + 1 < len(names):
        links.append(("Next", names[here + 1]))
    if here > 1 and names[0].startswith("00"):
        links.append(("Map of the lessons", names[0]))
    lines = [" | ".join(f"{word}: [{titles[target]}]({target}.ipynb)" for word, target in links)]
    if repository:
        lines.append(colab_badge(name, repository, tag))
    return "\n\n".join(line for line in lines if line) or "More lessons are in preparation."


def ensure_stamped_cells(nb):
    """Insert the `setup` cell and the two `nav` cells where they are missing: after the title, and at the end."""
    if not tagged(nb, "setup"):
        nb.cells.insert(1, nbformat.v4.new_code_cell(metadata={"tags": ["setup"]}, id="setup"))
    if not nb.cells[1:2] or "nav" not in tags(nb.cells[1]):
        nb.cells.insert(1, nbformat.v4.new_markdown_cell(metadata={"tags": ["nav"]}, id="nav-top"))
    if "nav" not in tags(nb.cells[-1]):
        nb.cells.append(nbformat.v4.new_markdown_cell(metadata={"tags": ["nav"]}, id="nav-end"))


def stamp_notebook(nb, name, titles, repository="", tag=""):
    """Write the setup cell and the navigation cells of one notebook, in place."""
    ensure_stamped_cells(nb)
    for cell in tagged(nb, "setup"):
        cell.source, cell.metadata = setup_cell.render(repository, tag), canonical_metadata(cell)
    for cell in tagged(nb, "nav"):
        cell.source = navigation(name, titles, repository, tag)


def lesson_table(titles):
    """README's table of all planned lessons."""
    rows = ["| # | lesson | question |", "|---|---|---|"]
    for name in sorted({*LESSONS, *titles}):
        link = f"[{titles[name].split(' · ')[-1]}](notebooks/{name}.ipynb)" if name in titles else "in preparation"
        rows.append(f"| {name[:2]} | {link} | {LESSONS.get(name, '')} |")
    return "\n".join(rows)


def stamp_readme(text, titles, repository="", tag=""):
    """README's text with its stamped blocks renewed; a block whose markers are absent is left out."""
    first = next(iter(titles), "00_start_here")
    badges = [colab_badge(first, repository, tag), binder_badge(first, repository, tag)] if repository else []
    for block, content in {"lessons": lesson_table(titles), "badges": "\n".join(badges)}.items():
        start, end = f"<!-- {block}:start -->", f"<!-- {block}:end -->"
        body = f"{start}\n{content}\n{end}" if content else f"{start}\n{end}"
        text = re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda match, body=body: body, text, flags=re.DOTALL)
    return text


def stamp(root=ROOT, dry=False):
    """Stamp every notebook and README; return the files that changed (with `dry`: that would change)."""
    repository, tag = publication(root)
    notebooks = {path.stem: read(path) for path in paths(root)}
    titles = {name: title(nb) for name, nb in notebooks.items()}
    changed = []
    for name, nb in notebooks.items():
        path = root / "notebooks" / f"{name}.ipynb"
        before = nbformat.writes(nb)
        stamp_notebook(nb, name, titles, repository, tag)
        if nbformat.writes(nb) != before:
            changed.append(path)
            if not dry:
                assign_ids(nb, nb)
                write(nb, path)
    readme = root / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        stamped = stamp_readme(text, titles, repository, tag)
        if stamped != text:
            changed.append(readme)
            if not dry:
                readme.write_text(stamped, encoding="utf-8", newline="\n")
    return changed


def assign_ids(nb, old):
    """Give every cell of `nb` the id that the same cell had in `old`, and new cells an id made from their source.

    Cells are the same where type and source agree in order, or where one was edited in place.
    """
    def key(cell):
        return cell.cell_type, cell.source

    kept = {}
    matcher = difflib.SequenceMatcher(None, [key(c) for c in old.cells], [key(c) for c in nb.cells], autojunk=False)
    for operation, a, a_end, b, b_end in matcher.get_opcodes():
        if operation == "equal" or (operation == "replace" and a_end - a == b_end - b):
            kept.update(zip(range(b, b_end), (cell.get("id") for cell in old.cells[a:a_end])))
    used = set()
    for i, cell in enumerate(nb.cells):
        identity, salt = kept.get(i), 0
        while not identity or identity in used:
            text = f"{cell.cell_type}\n{cell.source}\n{salt}"
            identity, salt = hashlib.sha256(text.encode()).hexdigest()[:8], salt + 1
        used.add(identity)
        cell["id"] = identity


def canonical_metadata(cell):
    """The cell's tags, and for the setup cell that JupyterLab folds its code away; nothing else."""
    kept = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
    return nbformat.from_dict(kept | (FOLDED if "setup" in tags(cell) else {}))


def clean(nb):
    """Leave in an executed notebook only what a reader needs, in place: no widget state, canonical metadata.

    A widget's view is dropped where the output has another representation; stream outputs that follow each other are
    joined; execution counts run 1, 2, 3, ...
    """
    nb.metadata = nbformat.from_dict(METADATA)
    count = 0
    for cell in nb.cells:
        cell.metadata = canonical_metadata(cell)
        cell.pop("attachments", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        outputs = []
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            if len(output.get("data", {})) > 1:
                output.data.pop(WIDGET_VIEW, None)
            last = outputs[-1] if outputs else {}
            if output.output_type == last.get("output_type") == "stream" and output.name == last.name:
                last.text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs


def run(nb, folder, times=1, after_each=None, kernel_name="python3"):
    """Run all cells in a fresh kernel whose working directory is `folder`, in place; `times` > 1: again in that kernel.

    after_each: called with the notebook after every round.
    Raises nbclient.exceptions.CellExecutionError where a cell raises that is not tagged `raises-exception`.
    """
    from nbclient import NotebookClient

    os.environ["OMP_NUM_THREADS"] = "1"
    client = NotebookClient(
        nb,
        timeout=600,
        kernel_name=kernel_name,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
    )
    with client.setup_kernel():
        for _ in range(times):
            for i, cell in enumerate(nb.cells):
                client.execute_cell(cell, i)
            if after_each:
                after_each(nb)


def execute(path):
    """Execute, clean and write one notebook; return (seconds, bytes)."""
    nb = read(path)
    start = time.perf_counter()
    run(nb, path.parent)
    seconds = time.perf_counter() - start
    clean(nb)
    assign_ids(nb, nb)
    write(nb, path)
    return seconds, path.stat().st_size


def from_py(source, path):
    """Take a notebook's cells, without outputs, from a "py:percent" file; cells that did not change keep their ids."""
    import jupytext

    nb = jupytext.read(source, fmt="py:percent")
    for cell in nb.cells:
        cell.metadata = nbformat.from_dict({"tags": list(cell.metadata.get("tags", []))})
    ensure_stamped_cells(nb)
    assign_ids(nb, read(path) if path.exists() else nbformat.v4.new_notebook())
    nb.metadata = nbformat.from_dict(METADATA)
    write(nb, path)


def to_py(path, target):
    """Write a notebook's cells as a "py:percent" file."""
    import jupytext

    nb = read(path)
    nb.metadata = nbformat.from_dict({"kernelspec": METADATA["kernelspec"]})
    jupytext.write(nb, target, fmt="py:percent")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks to execute, such as 03_sinusoidal; none: all")
    parser.add_argument("--stamp-only", action="store_true", help="execute nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 if stamping would change anything")
    parser.add_argument("--from-py", nargs=2, metavar=("FILE", "NAME"), help="take NAME's cells from FILE, execute it")
    parser.add_argument("--to-py", nargs=2, metavar=("NAME", "FILE"), help="write NAME's cells to FILE")
    options = parser.parse_args(arguments)
    folder = ROOT / "notebooks"

    if options.to_py:
        to_py(folder / f"{options.to_py[0]}.ipynb", options.to_py[1])
        return 0
    if options.check:
        stale = stamp(dry=True)
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not stamped: run `make notebooks`")
        return 1 if stale else 0
    names = [Path(name).stem for name in options.names]
    if options.from_py:
        source, name = options.from_py
        from_py(source, folder / f"{name}.ipynb")
        names.append(name)
    unknown = [name for name in names if not (folder / f"{name}.ipynb").is_file()]
    if unknown:
        print(f"no such notebook: {', '.join(unknown)}", file=sys.stderr)
        return 2

    stamp()
    failed = False
    for path in [] if options.stamp_only else [folder / f"{name}.ipynb" for name in names] or paths():
        try:
            seconds, size = execute(path)
            print(f"{path.stem}: {seconds:.1f} s, {size / 1024:.0f} KB", flush=True)
        except Exception as error:
            if type(error).__module__ != "nbclient.exceptions":
                raise
            print(f"{path.stem} failed and was not written:\n{error}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
