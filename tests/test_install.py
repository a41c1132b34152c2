"""Installing: pins, environment.yml, the wheel, tools/course.py's .venv, and what it says when something is missing."""
import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import course

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DIRECT = [*PROJECT["dependencies"], *(name for extra in PROJECT["optional-dependencies"].values() for name in extra)]

SYSTEMS = {
    "Linux": {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    "macOS": {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"},
    "Windows": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "platform_machine": "AMD64"},
}
PYTHONS = ["3.11.2", "3.11.9", "3.12.1", "3.13.0"]
ENVIRONMENTS = [
    {**system, "python_full_version": full, "python_version": full.rpartition(".")[0], "extra": "",
     "implementation_name": "cpython", "platform_python_implementation": "CPython"}
    for system in SYSTEMS.values() for full in PYTHONS
]


def pins(environment):
    """What constraints.txt pins in an environment: dict from canonical name to the list of its versions."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            if requirement.marker is None or requirement.marker.evaluate(environment):
                found.setdefault(canonicalize_name(requirement.name), []).append(specifier.version)
    return found


@functools.cache
def needs(name):
    """The requirements of an installed package; none for one that is not installed (a package of another system)."""
    try:
        return tuple(map(Requirement, importlib.metadata.requires(name) or []))
    except importlib.metadata.PackageNotFoundError:
        return ()


# ------------------------------------------------------------------------------------------ pins and requirements

@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: f"{e['sys_platform']}-{e['python_full_version']}")
def test_every_direct_dependency_is_pinned_once_on_every_system(environment):
    pinned = pins(environment)
    assert all(len(versions) == 1 for versions in pinned.values())
    for line in DIRECT:
        requirement = Requirement(line)
        (version,) = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), line


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: f"{e['sys_platform']}-{e['python_full_version']}")
def test_what_the_dependencies_need_is_pinned_too(environment):
    pinned, seen = pins(environment), set()
    names = [canonicalize_name(Requirement(line).name) for line in DIRECT]
    while names:
        name = names.pop()
        if name in seen or re.match(r"nvidia-|cuda-|triton$", name):  # torch's own, pinned by torch
            continue
        seen.add(name)
        assert name in pinned
        for requirement in needs(name):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                names.append(canonicalize_name(requirement.name))
    assert len(seen) > 80


@pytest.mark.skipif(Path(sys.prefix) != course.VENV, reason="only .venv is made from the pins")
def test_the_installed_versions_are_the_pinned_ones():
    for name, versions in pins(None).items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert Version(installed).public == Version(versions[0]).public, name


def test_installing_the_library_keeps_what_colab_has():
    colab = {"numpy": "2.0.2", "matplotlib": "3.10.0", "torch": "2.11.0", "ipywidgets": "7.7.1"}
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, PROJECT["dependencies"])}
    assert ranges.keys() == colab.keys()
    assert all(ranges[name].contains(version) for name, version in colab.items())


def test_conda_installs_what_make_venv_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert conda == ["python=3.11", "pip"]
    assert pip == {"pip": [" ".join(course.INSTALL[:2]), " ".join(course.INSTALL[2:])]}
    assert (ROOT / course.INSTALL[1]).is_file()


def test_the_cpu_index_is_the_same_in_environment_yml():
    assert f"# - --extra-index-url {course.CPU_INDEX}\n" in (ROOT / "environment.yml").read_text(encoding="utf-8")


def copy_of_the_course(target):
    """The files that an installation reads, in an empty folder."""
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "posenc_lib", target / "posenc_lib", ignore=shutil.ignore_patterns("__pycache__"))
    return target


def test_the_wheel_holds_the_whole_library_and_nothing_else(tmp_path):
    if Version(importlib.metadata.version("setuptools")) < Version("77"):
        pytest.skip("building without isolation needs setuptools 77 or newer here")
    source = copy_of_the_course(tmp_path)
    (source / "posenc_lib" / "course" / "look.mplstyle").write_text("figure.dpi: 100\n")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "built", "."]
    subprocess.run(command, cwd=source, check=True)
    (wheel,) = (source / "built").iterdir()
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {path.relative_to(source).as_posix() for path in (source / "posenc_lib").rglob("*")
             if path.suffix in (".py", ".mplstyle")}
    assert held == there


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("POSENC_SLOW"), reason="takes minutes; set POSENC_SLOW=1")
def test_the_pip_section_of_environment_yml_fills_an_empty_environment(tmp_path):
    source = copy_of_the_course(tmp_path)
    # as conda does it: the section becomes a requirements file beside environment.yml, installed from that folder
    section = yaml.safe_load((source / "environment.yml").read_text(encoding="utf-8"))["dependencies"][-1]["pip"]
    (source / "condaenv.requirements.txt").write_text("\n".join(section) + "\n")
    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=source, check=True)
    python = source / "env" / course.venv_python().relative_to(course.VENV)
    environment = course.venv_environment()
    for arguments in (["install", "-q", "-U", "--no-compile", "-r", "condaenv.requirements.txt"], ["check"]):
        subprocess.run([python, "-m", "pip", *arguments], cwd=source, env=environment, check=True)
    program = "import posenc_lib, jupyterlab, ipywidgets, nbval; print(posenc_lib.__file__)"
    where = subprocess.run([python, "-c", program], cwd=tmp_path.parent, env=environment, check=True, text=True,
                           stdout=subprocess.PIPE).stdout.strip()
    assert Path(where) == source / "posenc_lib" / "__init__.py"
    frozen = subprocess.run([python, "-m", "pip", "freeze", "--exclude-editable"], env=environment, check=True,
                            text=True, stdout=subprocess.PIPE).stdout
    pinned = pins(None)
    for requirement in map(Requirement, re.findall(r"^[\w.-]+==\S+", frozen, re.MULTILINE)):
        (specifier,) = requirement.specifier
        assert Version(specifier.version).public == Version(pinned[canonicalize_name(requirement.name)][0]).public


# ------------------------------------------------------------------------------------------ .venv

class FakePip:
    """Stands in for course.run_logged: notes each command, makes .venv's Python, and can fail at one step."""

    def __init__(self, output="", fails_at=None, error=None):
        self.commands, self.output, self.fails_at, self.error = [], output, fails_at, error

    def __call__(self, command):
        self.commands.append(command)
        if "venv" in command:
            course.venv_python().parent.mkdir(parents=True)
            course.venv_python().write_text("")
        if len(self.commands) == self.fails_at:
            if self.error:
                raise self.error
            return 1, self.output
        return 0, ""

    def installs(self):
        """The arguments of each `pip install`, without the fixed first ones."""
        fixed = ["-m", *course.PIP_INSTALL]
        return [command[1 + len(fixed):] for command in self.commands if command[1:1 + len(fixed)] == fixed]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty copy of the course that tools/course.py takes for its own."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(course, "ROOT", tmp_path)
    for name in ("VENV", "STAMP", "LOG", "LOCK"):
        monkeypatch.setattr(course, name, tmp_path / getattr(course, name).relative_to(ROOT))
    monkeypatch.setattr(course, "GIGABYTES", 0)
    for name in ("CPU", "PORT", "NO_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def pip(empty, monkeypatch):
    """pip("..."): from here on, building .venv is faked so."""
    def install(*args, **kwargs):
        fake = FakePip(*args, **kwargs)
        monkeypatch.setattr(course, "run_logged", fake)
        return fake
    return install


def test_a_second_run_does_nothing(pip, capsys):
    first = pip()
    assert course.main(["venv"]) == 0
    assert first.installs() == [course.INSTALL]
    second = pip()
    assert course.main(["venv"]) == 0
    assert second.commands == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change", [
    lambda root: (root / "constraints.txt").write_text("torch==2.4.0\n"),
    lambda root: (root / "pyproject.toml").write_text(
        (root / "pyproject.toml").read_text().replace("numpy>=2.0", "numpy>=2.1")),
    lambda root: course.STAMP.unlink(),
    lambda root: course.STAMP.write_text("{"),
    lambda root: course.STAMP.write_text("[]"),
    lambda root: course.venv_python().unlink(),
    lambda root: shutil.rmtree(course.VENV),
], ids=["pins", "dependencies", "half made", "broken stamp", "strange stamp", "Python gone", "removed"])
def test_venv_is_made_again_when_it_must(change, empty, pip):
    pip()
    course.ensure_venv()
    change(empty)
    again = pip()
    course.ensure_venv()
    assert len(again.installs()) == 1
    assert course.read_stamp()["key"] == course.pins_key()


def test_another_python_means_another_venv(pip, monkeypatch):
    pip()
    course.ensure_venv()
    monkeypatch.setattr(course, "VERSION", "3.99")
    again = pip()
    course.ensure_venv()
    assert len(again.installs()) == 1


def test_what_is_no_pin_does_not_matter(empty, pip):
    pip()
    course.ensure_venv()
    text = (empty / "pyproject.toml").read_text()
    (empty / "pyproject.toml").write_text(text.replace('tag = ""', 'tag = "v1"'))
    again = pip()
    course.ensure_venv()
    assert again.commands == []


def test_an_interrupted_build_leaves_no_venv(pip):
    pip(fails_at=2, error=KeyboardInterrupt())
    assert course.main(["venv"]) == 130
    assert not course.VENV.exists()


def test_cpu_takes_torch_alone_from_the_cpu_index(pip, monkeypatch, capsys):
    torch = re.search("^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group()
    monkeypatch.setenv("CPU", "1")
    fake = pip()
    course.main(["venv"])
    assert fake.installs() == [["--no-deps", "--index-url", course.CPU_INDEX, torch], course.INSTALL]
    monkeypatch.setenv("CPU", "0")
    (course.ROOT / "constraints.txt").write_text("torch==2.4.0\n")
    again = pip()
    course.main(["venv"])  # renewed for new pins: the choice made first still holds
    assert [arguments[-1] for arguments in again.installs()] == ["torch==2.4.0", course.INSTALL[-1]]
    assert capsys.readouterr().err == ""


def test_cpu_after_the_fact_says_what_to_do(pip, capsys):
    pip()
    course.main(["venv"])
    again = pip()
    course.main(["venv", "--cpu"])
    assert again.commands == [] and "make clean" in capsys.readouterr().out


def test_the_browser_tests_add_their_packages_once(pip):
    pip()
    course.ensure_venv()
    first = pip()
    course.ensure_venv(browser=True)
    second = pip()
    course.ensure_venv(browser=True)
    course.ensure_venv()
    assert (first.installs(), second.commands) == ([course.INSTALL_BROWSER], [])


def test_clean_keeps_the_workbook(empty, pip):
    pip()
    course.ensure_venv()
    (empty / "workbook").mkdir()
    (empty / "workbook" / "mine.ipynb").write_text("{}")
    for folder in ("posenc_lib", "tests", "tools"):
        (empty / folder).mkdir()
    assert course.main(["clean"]) == 0
    assert not course.VENV.exists() and (empty / "workbook" / "mine.ipynb").exists()


# ------------------------------------------------------------------------------------------ sentences

def one_sentence(capsys):
    """What was said on stderr, which must be one line."""
    said = capsys.readouterr().err
    assert said.endswith("\n") and said.count("\n") == 1 and said.rstrip().endswith((".", ")."))
    return said


@pytest.mark.parametrize("output, words", [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no space left"),
    ("OSError: [WinError 112] There is not enough space on the disk", "no space left"),
    ("connection broken by 'NewConnectionError: [Errno -3] Temporary failure in name resolution'\n"
     + "ERROR: No matching distribution found for torch", "cannot reach the package index"),
    ("ERROR: No matching distribution found for torch==2.13.0", "pip finds no torch==2.13.0"),
    ("ERROR: something else", "the reason is at the end of .venv-build.log"),
])
def test_a_failed_install_is_one_sentence(output, words, pip, capsys):
    pip(output, fails_at=2)
    assert course.main(["venv"]) == 1
    assert words in one_sentence(capsys)
    assert not course.VENV.exists()


def test_pips_own_words_for_an_unreachable_index_are_understood():
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--isolated", "--retries", "1", "--index-url",
               "http://127.0.0.1:9/simple", "posenc-lib-is-not-there"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         check=False)
    assert pip.returncode and "cannot reach the package index" in course.explain(pip.stdout)


def test_too_little_space_is_said_before_anything_is_installed(pip, monkeypatch, capsys):
    fake = pip()
    monkeypatch.setattr(course, "GIGABYTES", 2.0)
    monkeypatch.setattr(course.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3e8))
    assert course.main(["venv"]) == 1
    assert "too little space on the disk, 0.3 GB" in one_sentence(capsys) and fake.commands == []


def test_a_python_without_venv_is_said(pip, monkeypatch, capsys):
    fake = pip()
    monkeypatch.setattr(course.subprocess, "call", lambda *args, **kwargs: 1)
    assert course.main(["venv"]) == 1
    assert "has no venv module" in one_sentence(capsys) and fake.commands == []


def test_a_too_old_python_is_said(pip, monkeypatch, capsys):
    fake = pip()
    monkeypatch.setattr(course, "MINIMUM", (99, 0))
    monkeypatch.setattr(course, "newer_python", lambda: None)
    assert course.main(["venv"]) == 1
    assert "needs Python 3.11 or newer, and this is" in one_sentence(capsys) and fake.commands == []


def test_an_old_python_can_read_the_script():
    for name in ("course.py", "workbook.py"):
        ast.parse((ROOT / "tools" / name).read_text(encoding="utf-8"), feature_version=(3, 8))


def program(folder, name, script):
    """A shell script on PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_an_old_python_finds_a_newer_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert course.newer_python() is None
    program(tmp_path, "python3.13", "echo 'not installed' >&2; exit 127")
    program(tmp_path, "python3.12", "exec /bin/sh -c 'exit 1'")
    assert course.newer_python() is None
    program(tmp_path, "python3.11", f'exec "{sys.executable}" "$@"')
    assert course.newer_python() == [sys.executable]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_without_python_is_one_sentence(tmp_path):
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    made = subprocess.run([shutil.which("make"), "-f", ROOT / "Makefile", "test"], cwd=ROOT, text=True, check=False,
                          env={"PATH": str(tmp_path)}, capture_output=True)
    assert made.returncode and made.stdout == ""
    said = [line for line in made.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1 and "needs Python 3.11 or newer, and there is no python3 here" in said[0]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_alone_lists_the_commands():
    said = subprocess.run(["make"], cwd=ROOT, text=True, check=True, stdout=subprocess.PIPE).stdout
    assert set(course.COMMANDS) <= set(re.findall(r"^make (\w+)", said, re.MULTILINE))


# ------------------------------------------------------------------------------------------ commands

@pytest.fixture
def pytest_runs(empty, pip, monkeypatch):
    """statuses: what the two pytest runs of `test` return; calls: their arguments."""
    pip()
    runs = types.SimpleNamespace(statuses=[0, 0], calls=[])

    def run(arguments, **environment):
        runs.calls.append([str(argument) for argument in arguments])
        return runs.statuses[len(runs.calls) - 1]

    monkeypatch.setattr(course, "run", run)
    (empty / "notebooks").mkdir()
    return runs


@pytest.mark.parametrize("statuses, result", [([0, 0], 0), ([1, 0], 1), ([0, 1], 1), ([5, 0], 1), ([0, 5], 1)])
def test_make_test_fails_when_a_part_fails(statuses, result, pytest_runs, empty, capsys):
    (empty / "notebooks" / "00_a.ipynb").write_text("{}")
    pytest_runs.statuses = statuses
    assert course.main(["test"]) == result
    assert len(pytest_runs.calls) == 2 and "00_a.ipynb" in pytest_runs.calls[1][-1]
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED" if result else "All passed")


def test_make_test_fails_without_notebooks(pytest_runs, capsys):
    assert course.main(["test"]) == 1
    assert len(pytest_runs.calls) == 1 and "none found" in capsys.readouterr().out


def test_lab_listens_here_only_and_asks_nobody(empty, pip, monkeypatch, capsys):
    pip()
    (empty / "notebooks").mkdir()
    cell = {"cell_type": "code", "source": "1", "outputs": [], "execution_count": 1, "metadata": {}}
    (empty / "notebooks" / "00_start_here.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}}))
    commands = []
    monkeypatch.setattr(course, "replace_process", lambda command, environment: commands.append(command))
    monkeypatch.setattr(course.os, "chdir", lambda path: None)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    course.main(["lab", "--port", "8890", "--no-browser"])
    (command,) = commands
    for word in ("--LabApp.default_url=/lab/tree/workbook/00_start_here.ipynb",
                 "--ServerApp.ip=127.0.0.1", "--ServerApp.port=8890", "--no-browser", "--LabApp.news_url=None"):
        assert word in command
    monkeypatch.setenv("PORT", "8891")
    course.main(["lab"])
    assert "--ServerApp.port=8891" in commands[1] and "--no-browser" not in commands[1]
    assert (empty / "workbook" / "00_start_here.ipynb").is_file()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("port", ["lab", "70000"])
def test_a_strange_port_is_refused(port, capsys):
    with pytest.raises(SystemExit):
        course.main(["lab", "--port", port])
    assert "--port" in capsys.readouterr().err


def test_what_others_run_is_what_is_written_down():
    ci = ROOT / ".ci" / "run"
    assert os.name == "nt" or os.access(ci, os.X_OK)
    text = ci.read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("make test", "make browser"):
        assert re.search(f"^{command}", text, re.MULTILINE) and command in readme
    assert "- run: bash .ci/run\n" in workflow


def test_the_readmes_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([10, 64]) True\n"


def test_modules_are_compiled_once_even_where_the_machine_says_not_to(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "--no-compile" in course.PIP_INSTALL, "then the first import has to write what it compiles"
    assert "PYTHONDONTWRITEBYTECODE" not in course.venv_environment()
