"""Each lesson with an explorer, in JupyterLab: before it is run, after Run All, moved by keyboard, on a narrow page."""

import harness

OVERFLOW = """() => [...document.querySelectorAll('.jp-Notebook img, .jp-Notebook [role=slider]')]
  .filter(element => element.getBoundingClientRect().width > 0)
  .filter(element => element.getBoundingClientRect().right > innerWidth
      || element.getBoundingClientRect().right > element.closest('.jp-Cell').getBoundingClientRect().right + 1)
  .map(element => element.alt || element.className + ' ' + element.getBoundingClientRect().right)"""


def test_there_are_lessons_with_explorers():
    assert harness.NAMES


def test_unrun_lesson_shows_the_static_twin(open_lesson, name):
    lesson = open_lesson(name)
    assert lesson.explorers()
    for i, explorer in enumerate(lesson.explorers()):
        explorer.show()
        picture = explorer.cell.locator(".jp-OutputArea-output img")
        assert len(picture.get_attribute("alt")) >= 20
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") >= 300
        assert explorer.cell.locator("[role=slider]").count() == 0
        lesson.screenshot(f"unrun_{i}")
    assert lesson.errors() == []


def test_run_all_shows_no_error(lesson):
    assert lesson.errors() == []
    print(f"{lesson.name}: Run All {lesson.seconds:.1f} s")
    for explorer in lesson.explorers():
        explorer.show()
    lesson.screenshot("run")


def test_sliders_move_by_keyboard(lesson):
    for i, explorer in enumerate(lesson.explorers()):
        explorer.show()
        sliders = explorer.sliders()
        assert sliders and all(sliders)
        for label, handle in sliders.items():
            moved = [explorer.press(handle, key) for key in ("ArrowRight", "ArrowLeft", "End", "Home", "ArrowRight")]
            assert moved.count(True) >= 3, f"{label}: {moved}"
            assert moved[-1], f"{label} stays at its lower end"
            explorer.press(handle, "End")
            lesson.screenshot(f"explorer_{i}_{label.replace(' ', '_')}_end")
    assert lesson.errors() == []


def test_nothing_overflows_a_narrow_page(open_lesson, name):
    lesson = open_lesson(name, size=(700, 900))
    for state in ("unrun", "run"):
        if state == "run":
            lesson.run_all()
            assert lesson.errors() == []
        for explorer in lesson.explorers():
            explorer.show()
            lesson.screenshot(f"700px_{state}")
        assert lesson.page.evaluate(OVERFLOW) == []
