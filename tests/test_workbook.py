"""workbook/: the learner's work is never overwritten, and a newer lesson still reaches them."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import workbook

ROOT = Path(__file__).resolve().parents[1]
NAME = "03_lesson.ipynb"


def notebook(*sources, outputs=True):
    """A notebook (dict) with one markdown cell and a code cell for each source."""
    title = ["# 03 · Größe\n", "ü"]
    cells = [{"cell_type": "markdown", "id": "title", "metadata": {"tags": ["title"]}, "source": title}]
    for number, source in enumerate(sources):
        cells.append({
            "cell_type": "code", "id": f"c{number}", "metadata": {}, "source": source,
            "execution_count": number + 1 if outputs else None,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": "the answer\n"}] if outputs else [],
        })
    return {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}


class Desk:
    """A course folder with notebooks/ and workbook/."""

    def __init__(self, root):
        self.notebooks, self.workbook = root / "notebooks", root / "workbook"
        self.notebooks.mkdir()

    def publish(self, *sources, name=NAME):
        (self.notebooks / name).write_text(json.dumps(notebook(*sources)), encoding="utf-8")

    def learner_writes(self, *sources, name=NAME, outputs=True):
        (self.workbook / name).write_text(json.dumps(notebook(*sources, outputs=outputs)), encoding="utf-8")

    def update(self):
        return workbook.update(self.notebooks, self.workbook)

    def sources(self, name=NAME):
        cells = json.loads((self.workbook / name).read_text(encoding="utf-8"))["cells"]
        return [cell["source"] for cell in cells if cell["cell_type"] == "code"]

    def files(self):
        return sorted(path.name for path in self.workbook.glob("*.ipynb"))


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    desk.publish("a = 1")
    assert desk.update() == []
    return desk


def everything(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_answers_are_cleared_and_the_rest_is_kept(desk):
    copy = json.loads((desk.workbook / NAME).read_text(encoding="utf-8"))
    assert copy == notebook("a = 1", outputs=False)


def test_a_second_run_changes_nothing(desk):
    before = everything(desk.workbook)
    assert desk.update() == []
    assert everything(desk.workbook) == before


def test_an_untouched_lesson_is_renewed(desk):
    desk.publish("a = 2")
    (line,) = desk.update()
    assert "renewed" in line and desk.sources() == ["a = 2"] and desk.files() == [NAME]


@pytest.mark.parametrize("change", ["ran it", "empty cell", "metadata", "lines"])
def test_running_a_lesson_is_not_changing_it(desk, change):
    copy = notebook("a = 1", outputs=change == "ran it")
    if change == "empty cell":
        copy["cells"].append({"cell_type": "code", "metadata": {}, "source": "", "outputs": []})
    if change == "metadata":
        copy["metadata"]["widgets"] = {"state": {}}
    if change == "lines":
        copy["cells"][1]["source"] = ["a = ", "1"]
    (desk.workbook / NAME).write_text(json.dumps(copy), encoding="utf-8")
    desk.publish("a = 2")
    desk.update()
    assert desk.sources() == ["a = 2"] and desk.files() == [NAME]


def test_the_learners_work_is_kept(desk):
    desk.learner_writes("a = 'mine'")
    before = everything(desk.workbook)
    assert desk.update() == []
    assert everything(desk.workbook) == before


def test_a_newer_lesson_is_put_beside_the_learners_work_once(desk):
    desk.learner_writes("a = 'mine'")
    desk.publish("a = 2")
    (line,) = desk.update()
    assert NAME in line and "03_lesson.updated.ipynb" in line
    assert desk.sources() == ["a = 'mine'"] and desk.sources("03_lesson.updated.ipynb") == ["a = 2"]
    before = everything(desk.workbook)
    assert desk.update() == []
    assert everything(desk.workbook) == before
    (desk.workbook / "03_lesson.updated.ipynb").unlink()  # the learner has seen it
    assert desk.update() == [] and desk.files() == [NAME]


def test_an_even_newer_lesson_replaces_the_one_beside(desk):
    desk.learner_writes("a = 'mine'")
    for newer in ("a = 2", "a = 3"):
        desk.publish(newer)
        desk.update()
    assert desk.files() == [NAME, "03_lesson.updated.ipynb"]
    assert desk.sources() == ["a = 'mine'"] and desk.sources("03_lesson.updated.ipynb") == ["a = 3"]


def test_work_in_the_file_beside_is_kept_too(desk):
    desk.learner_writes("a = 'mine'")
    desk.publish("a = 2")
    desk.update()
    desk.learner_writes("a = 'mine again'", name="03_lesson.updated.ipynb")
    desk.publish("a = 3")
    (line,) = desk.update()
    assert "03_lesson.updated-2.ipynb" in line
    assert desk.sources() == ["a = 'mine'"] and desk.sources("03_lesson.updated.ipynb") == ["a = 'mine again'"]
    assert desk.sources("03_lesson.updated-2.ipynb") == ["a = 3"]


def test_a_learner_who_takes_the_newer_lesson_follows_the_course_again(desk):
    desk.learner_writes("a = 'mine'")
    desk.publish("a = 2")
    desk.update()
    (desk.workbook / "03_lesson.updated.ipynb").replace(desk.workbook / NAME)
    assert desk.update() == []
    desk.publish("a = 3")
    desk.update()
    assert desk.sources() == ["a = 3"] and desk.files() == [NAME]


def test_a_deleted_lesson_comes_back(desk):
    (desk.workbook / NAME).unlink()
    (line,) = desk.update()
    assert "is back" in line and desk.sources() == ["a = 1"]


def test_other_files_are_left_alone(desk):
    (desk.workbook / "my notes.txt").write_text("mine")
    desk.learner_writes("b = 1", name="my own.ipynb")
    (desk.notebooks / NAME).unlink()  # a lesson that left the course stays on the learner's desk
    before = everything(desk.workbook)
    assert desk.update() == []
    assert everything(desk.workbook) == before


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"03_lesson.ipynb": 3}', "\xff"])
def test_a_lost_manifest_loses_no_work(desk, manifest):
    path = desk.workbook / ".course" / "manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_text(manifest, encoding="latin-1")
    desk.learner_writes("a = 'mine'")
    desk.update()
    assert desk.sources() == ["a = 'mine'"] and desk.sources("03_lesson.updated.ipynb") == ["a = 1"]
    assert desk.update() == []


@pytest.mark.parametrize("broken", ["", "not json", "{}", '{"cells": 3}', "\xff\xfe"])
def test_a_file_that_is_no_notebook_counts_as_the_learners(desk, broken):
    (desk.workbook / NAME).write_text(broken, encoding="latin-1")
    desk.publish("a = 2")
    (line,) = desk.update()
    assert "kept" in line and (desk.workbook / NAME).read_text(encoding="latin-1") == broken
    assert desk.sources("03_lesson.updated.ipynb") == ["a = 2"]


def test_a_broken_lesson_is_named(desk):
    (desk.notebooks / NAME).write_text("{")
    with pytest.raises(ValueError, match=NAME):
        desk.update()


def test_the_real_lessons_keep_their_cells(tmp_path):
    workbook.update(ROOT / "notebooks", tmp_path)
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in lessons:
        assert workbook.fingerprint(tmp_path / path.name) == workbook.fingerprint(path)
        for cell in json.loads((tmp_path / path.name).read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None


def test_no_part_of_python_beyond_its_library_is_needed():
    program = "import sys; sys.path.insert(0, 'tools'); import workbook"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=ROOT, check=True)
