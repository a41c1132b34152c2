"""The house rules: what imports what, what is public and documented, what reads outside, and how large it is."""
import ast
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys
import tokenize

import pytest

import posenc_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "posenc_lib"
ROOMS = sorted(LIBRARY.glob("*.py"))
CLASSROOM = sorted((LIBRARY / "course").rglob("*.py"))

# Who stands on whom: a room may import from the floors below, and from its own floor as long as there is no circle.
FLOORS = [
    {"_checks"},
    {"angles", "offsets"},
    {"sinusoidal", "scaling", "configs"},
    {"method"},
    {"absolute", "rotary", "bias", "relative", "contextual", "structural", "kernels"},
    {"attention"},
    {"__init__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def imports(path):
    """Every module that a file imports anywhere, by its full name; relative names resolved."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[:len(parts) - node.level + 1] if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(path):
    names = {name.split(".")[1] for name in imports(path) if name.startswith("posenc_lib.")}
    return {name for name in names if (LIBRARY / f"{name}.py").exists()}


def test_importing_the_library_loads_torch_and_nothing_of_the_classroom():
    """Nor does it change torch's settings."""
    state = "print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed());"
    code = f"import torch, sys; torch.manual_seed(3); {state} import posenc_lib; {state} print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, check=True)
    before, after, modules = run.stdout.splitlines()
    loaded = {name.split(".")[0] for name in modules.split()}
    assert before == after and {"torch", "posenc_lib"} <= loaded
    assert not loaded & {"matplotlib", "ipywidgets", "IPython", "transformers"}


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: path.stem)
def test_no_room_imports_upwards(path):
    assert path.stem in FLOOR, f"say in FLOORS on which floor {path.name} stands"
    for other in rooms_imported(path):
        assert FLOOR[other] <= FLOOR[path.stem], f"{path.name} imports {other}.py from a floor above"


def test_no_room_imports_in_a_circle():
    graph = {path.stem: rooms_imported(path) for path in ROOMS}
    while leaves := [room for room, below in graph.items() if not below & graph.keys()]:
        for room in leaves:
            del graph[room]
    assert not graph, f"these rooms import each other: {sorted(graph)}"


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: path.stem)
def test_the_library_knows_nothing_of_the_classroom(path):
    for name in imports(path):
        assert not name.startswith("posenc_lib.course"), f"{path.name} imports {name}"
        assert name.split(".")[0] in {*sys.stdlib_module_names, "torch", "posenc_lib"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", CLASSROOM, ids=lambda path: path.relative_to(LIBRARY).as_posix())
def test_the_classroom_uses_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "posenc_lib":
            assert not any(alias.name.startswith("_") for alias in node.names), f"{path.name}, line {node.lineno}"


def test_the_import_reader_sees_every_form(tmp_path, monkeypatch):
    """The tests above are worth what `imports` is worth."""
    file = tmp_path / "posenc_lib" / "room.py"
    file.parent.mkdir()
    file.write_text("import os.path\nfrom . import course\nfrom .course.style import figure\n"
                    "def late():\n    from posenc_lib.course import check\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imports(file) >= {"os.path", "posenc_lib.course", "posenc_lib.course.style", "posenc_lib.course.check"}


def test_public_names_are_sorted_and_exist():
    assert posenc_lib.__all__ == sorted(posenc_lib.__all__)
    assert len(set(posenc_lib.__all__)) == len(posenc_lib.__all__)
    names = {name for name, value in vars(posenc_lib).items() if not inspect.ismodule(value)}
    assert {name for name in names if not name.startswith("_")} == set(posenc_lib.__all__)


def test_fixed_signatures():
    """Notebooks and users rely on them, names and defaults included."""
    for name, expected in {
        "frequencies": "(dim, base=10000.0)",
        "wavelengths": "(dim, base=10000.0)",
        "sinusoidal_encoding": "(positions, d_model, base=10000.0, *, layout='interleaved', dtype=torch.float32, "
                               "device=None)",
        "complex_encoding": "(positions, d_model, base=10000.0)",
        "shift_matrix": "(offset, d_model, base=10000.0)",
        "encoding_distance": "(offsets, d_model, base=10000.0)",
        "relative_offsets": "(q_positions, k_positions)",
        "clip_offsets": "(offsets, max_offset)",
        "Compose": "(*methods)",
        "Sinusoidal": "(d_model, base=10000.0)",
        "attend": "(q, k, v, method, *, q_positions=None, k_positions=None, causal=False, mask=None, "
                  "return_weights=False)",
        "SelfAttention": "(d_model, num_heads, method)",
        "SelfAttention.forward": "(self, x, positions=None, *, causal=False, mask=None)",
        "PositionMethod.embed": "(self, x, positions)",
        "PositionMethod.rotate": "(self, q, k, q_positions, k_positions)",
        "PositionMethod.bias": "(self, q_positions, k_positions)",
        "PositionMethod.logits": "(self, q, k, q_positions, k_positions, mask=None)",
        "PositionMethod.values": "(self, weights, v, q_positions, k_positions)",
    }.items():
        owner, _, attribute = name.partition(".")
        signature = inspect.signature(getattr(getattr(posenc_lib, owner), attribute) if attribute
                                      else getattr(posenc_lib, owner))
        plain = signature.replace(return_annotation=signature.empty, parameters=[
            p.replace(annotation=p.empty) for p in signature.parameters.values()])
        assert str(plain) == expected, name


def documented(value):
    """What is said besides a name's own text: by its module, its methods, and the bases that it shares with its kin."""
    yield sys.modules[value.__module__].__doc__ or ""
    for base in value.__mro__ if inspect.isclass(value) else ():
        if base.__module__.startswith("posenc_lib") and (base is value or base is not posenc_lib.PositionMethod):
            yield from (method.__doc__ or "" for method in vars(base).values() if inspect.isfunction(method))
            yield base.__doc__ or ""


@pytest.mark.parametrize("name", posenc_lib.__all__)
def test_every_public_name_says_its_shapes_errors_and_cost(name):
    value = getattr(posenc_lib, name)
    doc = inspect.getdoc(value)
    assert doc and value.__doc__, "what it is"
    if inspect.isclass(value) and issubclass(value, posenc_lib.PositionMethod):
        assert re.search(r"\bdoors?\b", doc, re.IGNORECASE), "which door it uses"
        if value is not posenc_lib.PositionMethod:
            assert re.search(r"\bcosts?\b", doc, re.IGNORECASE), "what it costs"
    everything = doc + "".join(documented(value))
    assert re.search(r"\((\.\.\.|[a-z_/0-9*+ -]+),|\(\.\.\.\)|shape", everything, re.IGNORECASE), "its shapes"
    if value is not posenc_lib.PositionMethod:
        assert re.search(r"\berrors?\b", everything, re.IGNORECASE), "its errors"


def code_lines(path):
    """Lines of a file that hold code: no blanks, comments or docstrings (strings that stand alone)."""
    text = path.read_text(encoding="utf-8")
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {line for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in nothing
             for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_the_library_stays_small():
    sizes = {path.name: code_lines(path) for path in ROOMS}
    assert sum(sizes.values()) <= 1300, sizes


def test_code_lines_counts_code_only(tmp_path):
    file = tmp_path / "small.py"
    file.write_text('"""Two\nlines."""\n\n# why\nx = """a\nb"""  # three lines with the next\ny = 1\n')
    assert code_lines(file) == 3


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def text_of(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""                                                              # a picture


OUTSIDE = re.compile("|".join([
    r"\.\./\.\./shared|\.\./shared",
    r"(?<![\w.~:/\"'-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers", "t" + "mp"]) + r")/\w",
    r"(?<![\w.~:/-])[\"']/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers", "t" + "mp"]) + r")/\w",
    r"\b[A-Z]:\\\\?Users\b",
]))


def test_nothing_in_the_repository_reads_outside_it():
    for path in tracked_files():
        if path == pathlib.Path(__file__).resolve():
            continue
        for number, line in enumerate(text_of(path).splitlines(), 1):
            found = OUTSIDE.search(line)
            assert not found, f"{path.relative_to(ROOT)}, line {number}: {found[0]}"


@pytest.mark.parametrize("line, outside", [
    ("open('/wo' '" + "rk/shared/x.json')", False), ("open('/" + "work/shared/x.json')", True),
    ('"/' + 'home/me/x"', True), ("see ../" + "shared/DESIGN.md", True), ("cd /" + "tmp/w", True),
    ("https://example.org/" + "home/me", False), ("notebooks/" + "work/x", False), ("~/" + "work/x", False),
])
def test_the_path_reader_sees_a_path_and_nothing_else(line, outside):
    assert bool(OUTSIDE.search(line)) == outside


def test_nothing_says_cuda_by_name():
    """Tensors follow the caller's device."""
    call = ".cu" + "da("
    for path in tracked_files():
        if path.suffix in {".py", ".ipynb"} and path != pathlib.Path(__file__).resolve():
            assert call not in text_of(path), path.relative_to(ROOT)


def test_golden_values_are_finite_numbers_with_inputs(golden):
    """The oracle file itself: every entry has inputs and expected values, and no NaN slipped in."""
    for method, entries in golden.items():
        for name, entry in entries.items():
            assert entry.keys() >= {"inputs", "expected"}, f"{method}.{name}"
            numbers = re.findall(r"[\w.+-]+", str([*entry["inputs"].values(), *entry["expected"].values()]))
            assert not {"nan", "inf", "-inf"} & set(numbers), f"{method}.{name}"


