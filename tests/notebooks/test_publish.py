"""The public address is set in one place, reaches everything that shows it, and leaves without a trace."""

import re
import shutil
import tomllib

import publish
import pytest
import setup_cell

import notebooks as tool

REPOSITORY, TAG = "someone/somewhere", "v9"


@pytest.fixture
def course(tmp_path):
    """A copy of what publishing may touch, in the unpublished state."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(tool.ROOT / name, tmp_path / name)
    shutil.copytree(tool.ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    publish.publish("", "", tmp_path)
    return tmp_path


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_everything_agrees_on_the_address(course):
    before = {path.stem: tool.read(path) for path in tool.paths(course)}
    publish.publish(REPOSITORY, TAG, course)
    assert tool.publication(course) == (REPOSITORY, TAG)
    assert tomllib.loads((course / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] == "posenc_lib"
    for path in tool.paths(course):
        nb = tool.read(path)
        assert [cell.source for cell in tool.tagged(nb, "setup")] == [setup_cell.render(REPOSITORY, TAG)]
        badge = f"https://colab.research.google.com/github/{REPOSITORY}/blob/{TAG}/notebooks/{path.name}"
        assert [cell.source.count(badge) for cell in tool.tagged(nb, "nav")] == [1, 1]
        assert [cell.get("outputs") for cell in nb.cells] == [cell.get("outputs") for cell in before[path.stem].cells]
        assert [cell.id for cell in nb.cells] == [cell.id for cell in before[path.stem].cells]
    readme = (course / "README.md").read_text(encoding="utf-8")
    assert f"https://mybinder.org/v2/gh/{REPOSITORY}/{TAG}?" in readme
    for text in [readme, *(path.read_text(encoding="utf-8") for path in tool.paths(course))]:
        for address in re.findall(rf"https://[^\s\"\\)]*{REPOSITORY}[^\s\"\\)]*", text):
            assert TAG in address or address == f"https://github.com/{REPOSITORY}", address
    assert tool.stamp(course, dry=True) == []


def test_unpublishing_gives_back_the_same_bytes(course):
    before = contents(course)
    publish.publish(REPOSITORY, TAG, course)
    assert contents(course) != before
    publish.publish("", "", course)
    assert contents(course) == before
    assert publish.publish("", "", course) == []


def test_a_changed_address_replaces_the_old_one(course):
    publish.publish(REPOSITORY, TAG, course)
    publish.publish("another/place", "v10", course)
    assert not [path for path, data in contents(course).items() if REPOSITORY.encode() in data]


def test_unpublished_means_no_address_at_all(course):
    for path in tool.paths(course):
        nb = tool.read(path)
        assert 'REPOSITORY, TAG = "", ""' in tool.tagged(nb, "setup")[0].source
        assert all("colab" not in cell.source for cell in tool.tagged(nb, "nav"))
    readme = (course / "README.md").read_text(encoding="utf-8")
    assert "colab.research.google.com/github" not in readme and "mybinder.org/v2" not in readme


def test_readme_has_the_marked_places():
    text = (tool.ROOT / "README.md").read_text(encoding="utf-8")
    for marker in ("lessons:start", "lessons:end", "badges:start", "badges:end"):
        assert text.count(f"<!-- {marker} -->") == 1


@pytest.mark.parametrize("repository, tag", [
    ("somewhere", "v9"), ("https://github.com/a/b", "v9"), ("a/b/c", "v9"), ("a/b.git", "v9"), ("a/..", "v9"),
    ("a b/c", "v9"), ('a/b"', "v9"), ("a/b\n", "v9"), ("a/b", "v 9"), ("a/b", "x/y"), ("a/b", "-v9"), ("a/b", "v..9"),
    ("a/b", ""), ("", "v9"),
])
def test_badly_shaped_addresses_are_refused_before_anything_is_written(course, repository, tag):
    before = contents(course)
    with pytest.raises(ValueError, match="REPO|TAG"):
        publish.publish(repository, tag, course)
    assert contents(course) == before


def test_command_line(capsys, monkeypatch):
    monkeypatch.delenv("REPO", raising=False)
    monkeypatch.delenv("TAG", raising=False)
    assert publish.main([]) == 2
    assert publish.main(["REPO=a/b"]) == 2
    assert publish.main(["a/b", "v9"]) == 2
    assert publish.main(["REPO=a/b", "TAG="]) == 2
    assert "belong together" in capsys.readouterr().err
