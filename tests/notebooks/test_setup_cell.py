"""The setup cell finds the library, or installs it and nothing else, or stops with one sentence."""

import importlib.metadata
import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pip
import pytest
import setup_cell
from nbclient.exceptions import CellExecutionError

import notebooks as tool

NEEDED = ("torch", "numpy", "matplotlib", "ipywidgets")
COLAB = {"ipywidgets": "7.7.1", "ipython": "7.34.0", "ipykernel": "6.17.1", "notebook": "6.5.7",
         "matplotlib": "3.10.0", "numpy": "2.0.2"}


def test_fits_on_a_screen_and_has_no_address():
    lines = setup_cell.render().splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 120
    assert 'REPOSITORY, TAG = "", ""' in lines


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment without the library, and a folder with pip and stand-ins for what the lessons need."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    shutil.copytree(Path(pip.__file__).parent, folder / "packages" / "pip")
    for name in (*NEEDED, "google/colab"):
        package = folder / "packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    wheel = folder / "posenc_lib-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("posenc_lib/__init__.py", "")
        info = "Metadata-Version: 2.1\nName: posenc_lib\nVersion: 1\nRequires-Dist: torch\nRequires-Dist: ipywidgets\n"
        archive.writestr("posenc_lib-1.dist-info/METADATA", info)
        archive.writestr("posenc_lib-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        archive.writestr("posenc_lib-1.dist-info/RECORD", "")
    binaries = "Scripts" if os.name == "nt" else "bin"
    python = shutil.which("python", path=folder / "venv" / binaries)
    (site,) = (folder / "venv").rglob("site-packages")
    return SimpleNamespace(python=python, site=site, packages=folder / "packages", wheel=wheel)


def run_cell(bare, folder, times=1, source=None, packages=None):
    """Run the cell `times` times in one process of the bare environment, with `folder` as working directory."""
    environment = {key: value for key, value in os.environ.items() if key not in ("POSENC_SOURCE", "PYTHONPATH")}
    environment["PYTHONPATH"] = str(packages or bare.packages)
    if source:
        environment["POSENC_SOURCE"] = str(source)
    code = "import sys\nspace = {}\nfor _ in range(int(sys.argv[1])):\n    exec(sys.argv[2], space)"
    command = [bare.python, "-c", code, str(times), setup_cell.render()]
    return subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)


def pip_output(python, *arguments):
    """What pip prints in an environment."""
    return subprocess.run([python, "-m", "pip", *arguments], check=True, capture_output=True, text=True).stdout


def installed(python):
    """{name: version} of everything that pip sees in an environment."""
    lines = pip_output(python, "list", "--format=freeze").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def test_unpublished_and_alone_says_what_to_do(bare, tmp_path):
    result = run_cell(bare, tmp_path)
    assert result.stdout == ""
    sentence = result.stderr.strip().splitlines()[-1]
    assert "Cannot find posenc_lib: get the whole course folder and run `make lab`" in sentence
    assert "pip install" in sentence and "POSENC_SOURCE" in sentence


def test_found_in_a_clone_without_installing(bare, tmp_path):
    (tmp_path / "posenc_lib").mkdir()
    (tmp_path / "posenc_lib" / "__init__.py").touch()
    inside = tmp_path / "notebooks" / "deeper"
    inside.mkdir(parents=True)
    for folder in (tmp_path, inside):
        assert run_cell(bare, folder, times=2).stdout == 2 * setup_cell.READY


def test_an_address_that_fails_is_named(bare, tmp_path):
    result = run_cell(bare, tmp_path, source=tmp_path / "nothing.whl")
    assert f"pip could not install {tmp_path / 'nothing.whl'}" in result.stderr.strip().splitlines()[-1]


def test_what_is_missing_is_named(bare, tmp_path):
    packages = tmp_path / "packages"
    shutil.copytree(bare.packages, packages)
    shutil.rmtree(packages / "torch")
    shutil.rmtree(packages / "ipywidgets")
    (packages / "posenc_lib").mkdir()
    (packages / "posenc_lib" / "__init__.py").touch()
    sentence = run_cell(bare, tmp_path / "packages", packages=packages).stderr.strip().splitlines()[-1]
    assert "Cannot find torch, ipywidgets: " in sentence and "make lab" in sentence


def test_installs_the_library_and_nothing_else(bare, tmp_path):
    before = set(bare.site.iterdir())
    try:
        result = run_cell(bare, tmp_path, times=2, source=bare.wheel)
        assert (result.stdout, result.stderr) == (2 * setup_cell.READY, "")
        new = set(bare.site.iterdir()) - before
        assert {path.name for path in new} == {"posenc_lib", "posenc_lib-1.dist-info"}
        assert run_cell(bare, tmp_path, source="not looked at").stdout == setup_cell.READY
    finally:
        for path in set(bare.site.iterdir()) - before:
            shutil.rmtree(path)


@pytest.mark.parametrize("git, address", [
    ("/usr/bin/git", "git+https://github.com/someone/somewhere@v9"),
    (None, "https://github.com/someone/somewhere/archive/v9.zip"),
])
def test_published_address(monkeypatch, tmp_path, git, address):
    commands = []

    def fake(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(shutil, "which", lambda name: git)
    monkeypatch.setitem(sys.modules, "posenc_lib", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("POSENC_SOURCE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cell.py").write_text(setup_cell.render("someone/somewhere", "v9"), encoding="utf-8")
    with pytest.raises(Exception, match="pip could not install"):
        runpy.run_path(str(tmp_path / "cell.py"))
    (command,) = commands
    assert command[0] == sys.executable and command[-1] == address and "--no-deps" in command


def test_run_all_stops_with_one_sentence_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.delenv("POSENC_SOURCE", raising=False)
    hide = nbformat.v4.new_code_cell("import sys\nsys.modules['posenc_lib'] = None")
    after = nbformat.v4.new_code_cell("print('still running')")
    nb = nbformat.v4.new_notebook(cells=[hide, nbformat.v4.new_code_cell(setup_cell.render()), after])
    with pytest.raises(CellExecutionError):
        tool.run(nb, tmp_path)
    (output,) = nb.cells[1].outputs
    assert output.ename == "SetupStopped"
    assert output.traceback == [output.evalue] and "\n" not in output.evalue
    assert output.evalue.startswith("Cannot find posenc_lib: ") and output.evalue.endswith(".")
    assert nb.cells[2].outputs == []


@pytest.mark.skipif(not os.environ.get("POSENC_COLAB_TEST"), reason="builds a large environment: POSENC_COLAB_TEST=1")
def test_a_lesson_alone_on_something_like_colab(tmp_path, monkeypatch):
    """Colab's old ipywidgets, IPython and numpy, a stub google.colab, one notebook in an empty folder, nothing of ours.

    POSENC_COLAB_TEST may be 1 or the name of a notebook; POSENC_COLAB_ENV may name a folder that keeps the environment.
    """
    folder = tmp_path / "colab"
    if os.environ.get("POSENC_COLAB_ENV"):
        folder = Path(os.environ["POSENC_COLAB_ENV"])
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pins = [f"{name}=={version}" for name, version in COLAB.items()]
        pins.append(f"torch=={importlib.metadata.version('torch')}")
        pip_output(python, "install", "--quiet", "setuptools<80", *pins)
        site = next((folder / "lib").glob("python3.*")) / "site-packages"
        (site / "google" / "colab").mkdir(parents=True)
        (site / "google" / "colab" / "__init__.py").touch()
    pip_output(python, "uninstall", "--yes", "--quiet", "posenc_lib")
    before = installed(python)
    assert {name: before[name] for name in COLAB} == COLAB

    kernel = tmp_path / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    start = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    specification = {"argv": start, "display_name": "like Colab", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(specification), encoding="utf-8")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", tool.ROOT, clone], check=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    wanted = os.environ["POSENC_COLAB_TEST"]
    path = next(path for path in reversed(tool.paths()) if wanted in ("1", path.stem))
    shutil.copy(path, alone)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)

    monkeypatch.delenv("POSENC_SOURCE", raising=False)
    stopped = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(setup_cell.render())])
    with pytest.raises(CellExecutionError):
        tool.run(stopped, alone, kernel_name="colab")
    assert stopped.cells[0].outputs[0].traceback == [stopped.cells[0].outputs[0].evalue]

    monkeypatch.setenv("POSENC_SOURCE", f"git+file://{clone}")
    nb = tool.read(alone / path.name)
    modules = nbformat.v4.new_code_cell("import google.colab, IPython, ipywidgets, numpy, posenc_lib\n"
                                        "print(IPython.__version__, ipywidgets.__version__, numpy.__version__)\n"
                                        "print(posenc_lib.__file__)")
    nb.cells.append(modules)
    tool.run(nb, alone, kernel_name="colab")
    versions, place = modules.outputs[0].text.splitlines()
    assert versions == f"{COLAB['ipython']} {COLAB['ipywidgets']} {COLAB['numpy']}"
    assert str(folder) in place, "the library that pip installed, not this one"
    after = installed(python)
    assert after.pop("posenc_lib")
    assert after == before
    assert tool.tagged(nb, "setup")[0].outputs[0].text == setup_cell.READY
    for cell in tool.tagged(nb, "explorer"):
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert {"text/html", "image/png", tool.WIDGET_VIEW} <= kinds
