"""The classroom's machinery: pictures, explorers and checks, apart from any lesson."""
import io

import ipywidgets
import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from posenc_lib.course import style
from posenc_lib.course.check import Exercise, Guess, Mistake
from posenc_lib.course.explorer import Choice, Explorer, LogSlider, Scene, Slider


class Dot(Scene):
    """A dot on a line: the smallest scene with three layers."""
    controls = {
        "place": Slider(0, 10, 3, help="where the dot is"),
        "reach": LogSlider(0, 2, 10.0, help="length of the line"),
        "colour": Choice(("blue", "orange"), "blue", help="of the dot"),
    }
    size = (3.0, 1.5)
    builds = 0

    def build(self):
        type(self).builds += 1
        ax = self.figure.subplots()
        ax.set(xlim=(0, 110), ylim=(-1, 1))
        self.line, = ax.plot([0, 1], [0, 0])
        self.dot, = ax.plot([0], [0], "o")
        self.layer(self.line, on="reach")
        self.layer(self.dot, on=("place", "colour"))

    def update(self, place, reach, colour):
        self.line.set_xdata([0, reach])
        self.dot.set_data([place], [0])
        self.dot.set_color({"blue": style.BLUE, "orange": style.ORANGE}[colour])

    def describe(self, place, reach, colour):
        return f"A {colour} dot at {place} on a line of length {style.number(reach)}."


def decoded(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_the_fast_png_holds_exactly_the_pixels_it_was_given():
    pixels = np.random.default_rng(0).integers(0, 256, size=(37, 53, 4), dtype=np.uint8)
    assert np.array_equal(decoded(style.live_png(pixels)), pixels[..., :3])


def test_a_picture_carries_its_alt_text_and_leaves_matplotlib_settings_alone():
    before = dict(matplotlib.rcParams)

    @style.drawing
    def draw():
        fig = style.figure(4, 2)
        fig.subplots().plot([1, 2])
        assert matplotlib.rcParams["axes.spines.top"] is False
        return style.Picture(fig, "A rising line\n   from 1 to <2>.")

    picture = draw()
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    assert bundle["text/plain"] == "Picture: A rising line from 1 to <2>."
    assert 'alt="A rising line from 1 to &lt;2&gt;."' in bundle["text/html"]
    assert decoded(picture.png).shape == (200, 400, 3)
    assert dict(matplotlib.rcParams) == before


def test_numbers_read_as_people_write_them():
    assert [style.number(x) for x in (1, 10000.0, 1995.262, 2.5118864, 0.000104)] == [
        "1", "10,000", "1,995", "2.512", "0.000104"]


def test_an_explorer_redraws_in_place():
    Dot.builds = 0
    explorer = Explorer(Dot, place=5)
    figure, picture, children = explorer.scene.figure, explorer.picture, explorer.children
    seen = {explorer.picture.value}
    for name, value in (("place", 6), ("reach", 100.0), ("colour", "orange"), ("place", 10), ("place", 0)):
        getattr(explorer, name).value = value
        seen.add(explorer.picture.value)
        assert explorer.sentence in explorer.status.value
    assert len(seen) == 6, "every move shows another picture"
    assert Dot.builds == 1 and explorer.scene.figure is figure, "the figure is built once"
    assert explorer.picture is picture and explorer.children is children, "no widget is made again"
    assert explorer.values == {"place": 0, "reach": 100.0, "colour": "orange"}


def test_an_explorer_is_labelled_and_described():
    explorer = Explorer(Dot)
    for name, slider in explorer.sliders.items():
        assert slider.description == name
        assert (getattr(slider, "tooltip", None) or slider.description_tooltip) == Dot.controls[name].help
    assert 'role="status"' in explorer.status.value and 'aria-live="polite"' in explorer.status.value


def test_an_explorer_leaves_a_still_picture_with_alt_text():
    explorer = Explorer(Dot, place=7)
    bundle = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == "Explorer: A blue dot at 7 on a line of length 10."
    assert 'alt="A blue dot at 7 on a line of length 10."' in bundle["text/html"]
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.model_id
    fresh = Dot().picture(place=7)
    assert (fresh.alt, decoded(fresh.png).shape) == (explorer.sentence, (150, 300, 3))


def test_an_explorer_names_what_it_cannot_do():
    with pytest.raises(TypeError, match=r"no such control: \['speed'\].*place"):
        Explorer(Dot, speed=3)
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        _ = Explorer(Dot).speed

    class Clash(Dot):
        controls = Dot.controls | {"layout": Slider(0, 1, 0)}

        def update(self, layout, **values):
            super().update(**values)

    with pytest.raises(ValueError, match="cannot be named 'layout'"):
        Explorer(Clash)

    class Typo(Dot):
        def build(self):
            self.layer(self.figure.subplots().plot([1])[0], on="plaec")

    with pytest.raises(ValueError, match="no such control.*plaec"):
        Typo()


def test_sliders_are_stock_widgets_so_that_colab_has_them():
    kinds = {type(slider) for slider in Explorer(Dot).sliders.values()}
    assert kinds == {ipywidgets.IntSlider, ipywidgets.FloatLogSlider, ipywidgets.SelectionSlider}


double = Exercise(lambda x: 2 * np.asarray(x), probes=[(np.arange(3),), (5,)], praise="Twice, every time.",
                  mistakes=[Mistake("square", lambda x: np.asarray(x) ** 2, "You squared it.")])


@pytest.mark.parametrize(("answer", "status", "message"), [
    (lambda x: x + x, "correct", "Twice"),
    (lambda x: torch.as_tensor(x) * 2, "correct", "Twice"),
    (lambda x: x * x, "not yet", "You squared it."),
    (lambda x: 0 * np.asarray(x) + 2 * np.max(x), "not yet",
     "For x = [0, 1, 2]: the first entry that is off is at [0]: expected 0, yours is 4."),
    (lambda x: np.arange(4), "not yet", "expected shape (3,), yours is (4,)"),
    (lambda x: 1 / 0, "not yet", "your function raised ZeroDivisionError: division by zero"),
    (lambda x: "six", "not yet", "For x = [0, 1, 2]: 'six' will not do; write a number."),
    (lambda x: 2 * x if np.ndim(x) else 11, "not yet", "For x = 5: 11 is not it."),
    (lambda x: None, "not done yet", "returns nothing yet"),
    (7, "not yet", "Hand over the function itself, not 7"),
])
def test_a_check_says_what_is_wrong(answer, status, message):
    verdict = double(answer)
    assert verdict.status == status and message in verdict.message
    assert repr(verdict).startswith(status.capitalize()) and f"<b>{status.capitalize()}.</b>" in verdict._repr_html_()


def test_messages_name_the_arguments_and_round_numbers():
    halve = Exercise(lambda vector, by: vector / by, probes=[(np.array([1.23456789, 2.0]), 3.0)], praise="Divided.")
    assert halve(lambda vector, by: 7).message == (
        "For vector = [1.235, 2.0], by = 3.0: expected shape (2,), yours is ().")
    assert halve(lambda vector: vector).message.startswith("For [1.235, 2.0], 3.0: your function raised TypeError")
    assert Exercise(3, praise="Three.")("3").message == "'3' will not do; write a number."
    assert Exercise([True, False], praise="Yes and no.")([1, 0]).message == "[1, 0] will not do; write True or False."
    assert Exercise(["a", "b"], praise="Both.")(["a"]).message == "Expected shape (2,), yours is (1,)."


def test_a_learners_function_cannot_spoil_the_probes():
    def spoils(x):
        if isinstance(x, np.ndarray):
            x *= 0
        return 2 * x

    assert double(spoils).status == "not yet" and double(lambda x: 2 * x).status == "correct"


def test_a_value_is_checked_by_kind():
    yes = Exercise(True, praise="It holds.")
    assert [yes(a).status for a in (True, False, 1, "True")] == ["correct", "not yet", "not yet", "not yet"]
    word = Exercise("equivariant", praise="It moves along.")
    assert word(" Equivariant ").status == "correct" and word("invariant").status == "not yet"
    close = Exercise(0.5, praise="Half.", tolerance=1e-2)
    assert close(0.501).status == "correct" and close(0.52).status == "not yet"


def test_where_integers_are_wanted_the_right_numbers_as_floats_get_a_hint():
    count = Exercise(lambda n: torch.arange(n), praise="Counted.", probes=[(3,), (1,)], integers=True)
    assert count(torch.arange).status == count(lambda n: list(range(n))).status == "correct"
    for floats in (lambda n: torch.arange(n).float(), lambda n: [float(i) for i in range(n)]):
        assert count(floats).status == "not yet" and "floats" in count(floats).message
    assert "floats" not in count(lambda n: torch.ones(n)).message


def test_a_function_exercise_without_probes_is_refused():
    with pytest.raises(ValueError, match="needs probes"):
        Exercise(abs, praise="")


def test_a_guess_takes_letters_in_any_case():
    guess = Guess(a="First.", b="Second.")
    assert guess("(a).").message.startswith("(a) First.")
    assert guess(" B ").message.startswith("(b) Second.")
    assert guess("c").message == "The options are a, b."
