"""What holds for every lesson: checks know right from wrong, solutions solve, explorers survive any move."""
import ast
import contextlib
import importlib
import itertools
import pkgutil
import random
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from posenc_lib.course import lessons
from posenc_lib.course.check import Exercise, Guess
from posenc_lib.course.explorer import Scene

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [module.name for module in pkgutil.iter_modules(lessons.__path__)]
MODULES = []
for name in NAMES:
    with contextlib.suppress(Exception):             # a lesson that cannot be imported fails its own test below
        MODULES.append(importlib.import_module(f"{lessons.__name__}.{name}"))


def members(kind):
    """(label, object) of every module-level Exercise or Guess, or Scene class, of every lesson."""
    for module in MODULES:
        for name, value in vars(module).items():
            if kind is Scene:
                is_kind = isinstance(value, type) and issubclass(value, Scene) and value.__module__ == module.__name__
            else:
                is_kind = isinstance(value, kind)
            if is_kind:
                yield pytest.param(value, id=f"{module.__name__.rpartition('.')[2]}.{name}")


def tags(cell):
    return cell.metadata.get("tags", [])


EXERCISES, GUESSES, SCENES = list(members(Exercise)), list(members(Guess)), list(members(Scene))


@pytest.fixture(autouse=True)
def settings_of_a_notebook_end_with_it():
    """A notebook that changes torch's or numpy's settings must not change them for the tests that follow."""
    dtype, grad, threads, printing = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                                      np.get_printoptions())
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)
    np.set_printoptions(**printing)


@pytest.mark.parametrize("name", NAMES)
def test_every_lesson_imports(name):
    assert importlib.import_module(f"{lessons.__name__}.{name}").__doc__.startswith("Lesson ")


def test_every_lesson_is_found():
    assert MODULES and EXERCISES and GUESSES and SCENES and NOTEBOOKS


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_right_answer_is_correct_and_says_something_worth_reading(exercise):
    verdict = exercise(exercise.right)
    assert verdict.status == "correct"
    assert len(verdict.message) > 20


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_unsolved_stub_is_not_done_yet(exercise):
    for stub in (..., None, lambda *arguments: ...) if callable(exercise.right) else (..., None):
        assert exercise(stub).status == "not done yet"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_listed_mistake_gets_its_own_hint(exercise):
    assert exercise.mistakes, "an exercise names at least one mistake"
    for mistake in exercise.mistakes:
        verdict = exercise(mistake.answer)
        assert (verdict.status, verdict.message) == ("not yet", mistake.hint), mistake.name
    hints = [mistake.hint for mistake in exercise.mistakes]
    assert len(set(hints)) == len(hints)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_any_other_answer_is_wrong_without_an_exception(exercise):
    def raises(*arguments):
        raise RuntimeError("oops")

    for nonsense in ("nonsense", object(), [[1, 2], [3]], float("nan"), raises, lambda *arguments: "nonsense"):
        assert exercise(nonsense).status == "not yet"


@pytest.mark.parametrize("guess", GUESSES)
def test_a_guess_is_noted_and_gives_nothing_away(guess):
    assert len(guess.options) >= 2
    assert guess(...).status == "not done yet"
    assert guess("z").status == "not yet"
    for letter, option in guess.options.items():
        assert guess(letter.upper()).status == "noted" and option in guess(letter).message


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_published_solutions_pass_their_checks(path, monkeypatch):
    """The cells run in order; at each exercise the stub is replaced by the block of its solution cell."""
    monkeypatch.chdir(path.parent)
    cells = nbformat.read(path, as_version=4).cells
    space, solved = {"__name__": "__main__"}, 0
    for cell, following in zip(cells, cells[1:]):
        if cell.cell_type != "code":
            continue
        exec(compile(cell.source, path.stem, "exec"), space)
        if "exercise" in tags(cell):
            assert "solution" in tags(following)
            blocks = re.findall(r"```python\n(.*?)```", following.source, re.DOTALL)
            assert len(blocks) == 1
            exec(compile(blocks[0], path.stem, "exec"), space)
            check = ast.unparse(ast.parse(cell.source).body[-1])
            assert eval(check, space).status == "correct", check
            solved += 1
    assert solved >= 3


def grid(scene, most=60):
    """Control values to drive a scene through: the product of each control's grid, thinned evenly."""
    names = list(scene.controls)
    states = [dict(zip(names, state)) for state in itertools.product(*(c.grid() for c in scene.controls.values()))]
    return states[:: -(-len(states) // most)] + [states[-1]]


@pytest.mark.parametrize("scene_class", SCENES)
def test_a_scene_survives_its_whole_grid_and_says_what_it_shows(scene_class):
    scene, frames, sentences = scene_class(), set(), set()
    states = grid(scene)
    for state in states:
        pixels = scene.frame(**state)
        frames.add(pixels.tobytes())
        sentence = scene.describe(**state)
        sentences.add(sentence)
        assert pixels.std() > 1 and len(sentence) >= 40 and "nan" not in sentence.lower().split()
    assert len(frames) > len(states) / 3 and len(sentences) > len(states) / 3


@pytest.mark.parametrize("scene_class", SCENES)
def test_a_frame_depends_on_the_values_alone_and_never_on_the_moves_that_led_there(scene_class):
    rng = random.Random(0)
    scene, states = scene_class(), grid(scene_class)
    state = dict(states[0])
    for step in range(24):
        if step % 6 == 0:                            # now and then everything jumps, else one slider moves
            state = dict(rng.choice(states))
        else:
            name = rng.choice(list(state))
            state[name] = rng.choice(scene.controls[name].grid())
        pixels = scene.frame(**state).copy()
        if step % 6 == 5:
            assert np.array_equal(pixels, scene_class().frame(**state)), state


@pytest.mark.parametrize("scene_class", SCENES)
def test_every_control_is_labelled_and_explained(scene_class):
    for name, control in scene_class.controls.items():
        assert control.help, f"{name} needs a help text"
        assert control.value in control.grid()
