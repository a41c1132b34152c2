"""Every committed notebook keeps the anatomy of a lesson, and can be read without running it."""

import ast
import base64
import re
import statistics
from html.parser import HTMLParser
from urllib.parse import unquote

import nbformat
import pytest
import setup_cell

import notebooks as tool

PATHS = tool.paths()
REPOSITORY, TAG = tool.publication()
TAGS = {"title", "nav", "setup", "predict", "explorer", "exercise", "solution", "myth", "derivation"}
NBVAL_TAGS = {"nbval-ignore-output", "raises-exception"}


class Tags(HTMLParser):
    """Collects the start tags of a piece of HTML as (name, attributes)."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))

    def all(self, wanted):
        return [attributes for name, attributes in self.found if name == wanted]


class Lesson:
    """A notebook with the views that the tests need."""

    def __init__(self, path):
        self.path, self.name, self.nb = path, path.stem, tool.read(path)
        self.cells = self.nb.cells
        self.code = [cell for cell in self.cells if cell.cell_type == "code"]
        self.markdown = [cell for cell in self.cells if cell.cell_type == "markdown"]
        self.is_start = self.name.startswith("00")

    def tagged(self, tag):
        return tool.tagged(self.nb, tag)

    def heading(self, pattern):
        """Index of the cell with the last heading that matches the pattern."""
        found = [i for i, cell in enumerate(self.cells) if cell.cell_type == "markdown"
                 and re.search(rf"^#{{1,4}} .*{pattern}", cell.source, re.MULTILINE | re.IGNORECASE)]
        assert found, f"no heading {pattern!r}"
        return found[-1]


def outputs(cell):
    """The outputs of a code cell as (mime type, text); stdout and stderr stand for stream outputs."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.name, output.text
        elif output.output_type == "error":
            yield "error", "\n".join(output.traceback)
        else:
            yield from output.data.items()


def printed(cell):
    """What a reader sees as text: stdout and text/plain."""
    return "\n".join(text for kind, text in outputs(cell) if kind in ("stdout", "text/plain"))


def python_blocks(cell):
    return re.findall(r"^```python\n(.*?)^```\s*$", cell.source, re.MULTILINE | re.DOTALL)


def names_bound(source):
    """The names that a piece of code binds at its top level."""
    bound = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return bound


@pytest.fixture(params=PATHS, ids=lambda path: path.stem, scope="module")
def lesson(request):
    return Lesson(request.param)


def test_there_are_notebooks():
    assert PATHS


def test_stamps_are_current():
    assert tool.stamp(dry=True) == [], "run `make notebooks`"


def test_every_planned_name_is_in_the_plan():
    assert {path.stem for path in PATHS} <= set(tool.LESSONS)


def test_file_is_canonical(lesson):
    nb = tool.read(lesson.path)
    assert lesson.path.read_text(encoding="utf-8") == nbformat.writes(nb).rstrip("\n") + "\n"
    tool.clean(nb)
    tool.assign_ids(nb, nb)
    assert nbformat.writes(nb) == nbformat.writes(lesson.nb), "not as tools/notebooks.py writes it"


def test_title_cell(lesson):
    first = lesson.cells[0]
    assert first.cell_type == "markdown" and "title" in tool.tags(first)
    assert re.match(rf"# {lesson.name[:2]} · \S", first.source), "begins with '# NN · Title'"
    assert "?" in first.source, "asks the lesson's one question"
    assert re.search(r"\d+ minutes", first.source), "says how long it takes"
    assert "prerequisite" in first.source.lower(), "names the prerequisites"
    after = re.search(r"^.*After this you can.*\n+((?:^ {0,3}[-*] .*\n?(?:^ {2,}.*\n?)*)+)", first.source, re.MULTILINE)
    assert after, "lists what you can do afterwards"
    assert len(re.findall(r"^ {0,3}[-*] ", after.group(1), re.MULTILINE)) == 3


def test_opening_and_closing_cells(lesson):
    assert [sorted(tool.tags(cell)) for cell in lesson.cells[:3]] == [["title"], ["nav"], ["setup"]]
    assert lesson.cells[3].cell_type == "code" and "import" in lesson.cells[3].source
    assert sorted(tool.tags(lesson.cells[-1])) == ["nav"]
    assert len(lesson.tagged("nav")) == 2 and len(lesson.tagged("setup")) == 1


def test_setup_cell_is_the_same_everywhere(lesson):
    (cell,) = lesson.tagged("setup")
    assert cell.source == setup_cell.render(REPOSITORY, TAG)
    assert [output.get("text") for output in cell.outputs] == [setup_cell.READY]


def test_tags_are_known(lesson):
    for cell in lesson.cells:
        assert tool.tags(cell) <= TAGS | NBVAL_TAGS, cell.source
    for tag in ("predict", "explorer", "exercise", "derivation", "setup"):
        assert all(cell.cell_type == "code" for cell in lesson.tagged(tag))
    for tag in ("title", "nav", "solution"):
        assert all(cell.cell_type == "markdown" for cell in lesson.tagged(tag))


def test_teaching_cells(lesson):
    assert lesson.tagged("explorer")
    assert lesson.tagged("predict")
    assert lesson.is_start or lesson.tagged("derivation")
    assert len([cell for cell in lesson.tagged("myth") if cell.cell_type == "code"]) <= 4


def test_a_myth_is_claim_test_and_statement(lesson):
    kinds = "".join(
        ("c" if cell.cell_type == "code" else "m") if "myth" in tool.tags(cell) else " " for cell in lesson.cells
    )
    for run in kinds.split():
        assert re.fullmatch(r"m(?:c+m+)+", run), f"claim, test, right statement; not {run}"


def test_explorer_shows_a_static_twin(lesson):
    for cell in lesson.tagged("explorer"):
        kinds = [kind for kind, _ in outputs(cell)]
        assert "text/html" in kinds and "image/png" in kinds, cell.source


def test_exercises_and_solutions(lesson):
    exercises = [i for i, cell in enumerate(lesson.cells) if "exercise" in tool.tags(cell)]
    assert len(exercises) >= 3
    for i in exercises:
        stub, solution = lesson.cells[i], lesson.cells[i + 1]
        assert re.match(r"# Exercise \S", stub.source), stub.source
        assert re.search(r"\bcheck_\w+\([^()]*\)$", stub.source.strip().splitlines()[-1]), "ends in its check"
        assert re.search(r"not done yet", printed(stub), re.IGNORECASE), f"an unsolved stub says so: {stub.source}"
        assert "solution" in tool.tags(solution), f"a solution follows {stub.source}"
        (block,) = python_blocks(solution)
        assert names_bound(stub.source) <= names_bound(block), "the solution defines what the stub defines"
    assert len(lesson.tagged("solution")) == len(exercises)


def test_solutions_are_folded_and_have_three_hints(lesson):
    for cell in lesson.tagged("solution"):
        parts = cell.source.count("<details")
        assert parts >= 2 and parts == cell.source.count("</details>") == cell.source.count("<summary>")
        hidden = "".join(re.findall(r"<details.*?</details>", cell.source, re.DOTALL))
        assert "```" not in re.sub(r"<details.*?</details>", "", cell.source, flags=re.DOTALL), "code is folded away"
        assert re.search(r"\n\n```python\n", hidden), "a blank line before the code, or GitHub does not render it"
        steps = max(len(re.findall(r"\bhint\b", cell.source, re.IGNORECASE)),
                    len(re.findall(r"^\d\. ", cell.source, re.MULTILINE)))
        assert steps >= 3, "three hints, step by step"


def test_closing_sections(lesson):
    wild, summary, references = (lesson.heading(word) for word in ("in the wild", "summary", "references"))
    assert wild <= summary <= references, "In the wild, Summary, References, in this order"
    assert summary > 0.75 * len(lesson.cells)
    if not lesson.is_start:
        assert re.search(r"arXiv:? ?\d{4}\.\d{4,5}", "\n".join(cell.source for cell in lesson.cells[references:]))


def test_cell_lengths(lesson):
    lengths = [len(cell.source.splitlines()) for cell in lesson.code]
    assert max(lengths) <= 25
    assert statistics.median(lengths) <= 8


def test_executed_once_from_top_to_bottom(lesson):
    assert [cell.execution_count for cell in lesson.code] == list(range(1, len(lesson.code) + 1))
    for cell in lesson.code:
        for output in cell.outputs:
            assert output.get("execution_count", cell.execution_count) == cell.execution_count


def test_no_errors_and_no_warnings(lesson):
    for cell in lesson.code:
        kinds = {kind for kind, _ in outputs(cell)}
        assert "stderr" not in kinds, cell.source
        assert "error" not in kinds or "raises-exception" in tool.tags(cell), cell.source


def test_metadata_is_clean(lesson):
    assert lesson.nb.metadata == tool.METADATA
    assert (lesson.nb.nbformat, lesson.nb.nbformat_minor) == (4, 5)
    for cell in lesson.cells:
        kept = dict(cell.metadata)
        if "setup" in tool.tags(cell):
            assert kept.pop("jupyter") == {"source_hidden": True}, "JupyterLab folds the setup cell's code away"
        assert set(kept) <= {"tags"}
    assert len({cell.id for cell in lesson.cells}) == len(lesson.cells)
    nbformat.validate(lesson.nb)


def test_no_widget_view_is_saved(lesson):
    for cell in lesson.code:
        assert tool.WIDGET_VIEW not in dict(outputs(cell)), cell.source


def test_sizes(lesson):
    assert lesson.path.stat().st_size <= 2**20
    for cell in lesson.code:
        for kind, text in outputs(cell):
            if kind in ("image/png", "image/jpeg"):
                assert len(base64.b64decode(text)) <= 150 * 1024, cell.source
            if kind == "image/svg+xml":
                assert len(text) <= 150 * 1024, cell.source


def alternative_texts(lesson):
    """Every picture's alternative text: in markdown, in HTML inside markdown, and in HTML outputs."""
    for cell in lesson.markdown:
        yield from re.findall(r"!\[([^\]]*)\]\(", cell.source)
        yield from (image.get("alt", "") for image in Tags(cell.source).all("img"))
    for cell in lesson.code:
        for kind, text in outputs(cell):
            if kind == "text/html":
                yield from (image.get("alt", "") for image in Tags(text).all("img"))


def test_pictures_have_alternative_text(lesson):
    for text in alternative_texts(lesson):
        assert len(text.strip()) >= 20, f"says what the picture shows: {text!r}"
        assert not re.search(r"\.(?:png|svg|jpe?g)$", text.strip()), f"a file name is no description: {text!r}"
    for cell in lesson.code:
        for output in cell.outputs:
            data = output.get("data", {})
            if any(kind.startswith("image/") for kind in data):
                assert Tags(data.get("text/html", "")).all("img"), f"a picture without alternative text: {cell.source}"


def anchors(nb):
    """The anchors of a notebook's headings, in JupyterLab's and GitHub's spelling, lower case."""
    found = set()
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            for text in re.findall(r"^#{1,6} (.+?)\s*$", cell.source, re.MULTILINE):
                found.add(text.replace(" ", "-").lower())
                found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-").lower())
            found |= set(re.findall(r"""<a (?:id|name)=["']([^"']+)""", cell.source))
    return found


def test_relative_links_resolve(lesson):
    for cell in lesson.markdown:
        prose = re.sub(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", "", cell.source, flags=re.DOTALL)
        targets = re.findall(r"\]\(([^()\s]+)(?: \"[^\"]*\")?\)", prose)
        targets += [link.get("href", "") for link in Tags(prose).all("a")]
        targets += [image.get("src", "") for image in Tags(prose).all("img")]
        for target in targets:
            if re.match(r"https?:|mailto:|data:|attachment:", target):
                assert not target.startswith(("attachment:", "http:")), target
                continue
            file, _, anchor = unquote(target).partition("#")
            path = (lesson.path.parent / file).resolve() if file else lesson.path
            assert path.is_relative_to(tool.ROOT) and path.exists(), f"dead link {target}"
            if anchor and path.suffix == ".ipynb":
                assert anchor.lower() in anchors(tool.read(path)), f"no heading for {target}"


def visible_text(lesson):
    """Sources and textual outputs, without the pictures' data."""
    for cell in lesson.cells:
        yield cell.source
    for cell in lesson.code:
        for kind, text in outputs(cell):
            if not kind.startswith("image/"):
                yield re.sub(r"data:image/[\w+]+;base64,[A-Za-z0-9+/=]+", "", str(text))


def test_no_paths_of_a_machine(lesson):
    folders = "work|root|tmp|home|Users|opt|usr|mnt|content"
    for text in visible_text(lesson):
        assert not re.search(rf"(?<![\w.])/(?:{folders})/|\b[A-Z]:\\\\?\w", text), text
        assert not re.search(r"ipykernel_\d|0x[0-9a-f]{8,}", text), text


def test_no_address_of_ours_but_the_published_one(lesson):
    for cell in lesson.cells:
        if tool.tags(cell) & {"setup", "nav"}:
            continue
        hosts = r"colab\.research\.google\.com/github|mybinder\.org/v2|raw\.githubusercontent\.com|nbviewer\.org/github"
        assert not re.search(hosts, cell.source), "badges are stamped into the navigation cells only"
        for address in re.findall(r"https?://[^\s)>\"']+", cell.source):
            ours = re.search(r"posenc|your-?(?:user)?name|owner/", address)
            assert not ours or (REPOSITORY and REPOSITORY in address), f"an invented address: {address}"


def test_printed_numbers_are_short(lesson):
    for cell in lesson.code:
        if tool.tags(cell) & {"setup"}:
            continue
        for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w]*\.\d)", printed(cell)):
            digits = number.replace(".", "").lstrip("0")
            assert len(digits) <= 6, f"{number} has {len(digits)} significant digits: {cell.source}"
