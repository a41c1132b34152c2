"""Explorers: labelled sliders over one picture that redraws in place, with a sentence saying what it shows.

A `Scene` owns one persistent figure. Its artists lie in layers, bottom to top, and each layer names the controls it
depends on; when a control moves, the pixels below its first layer are restored and only what lies above is drawn.
A frame depends on the control values alone, never on the moves that led there.
"""
import html
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np

from . import style


@dataclass(frozen=True)
class Slider:
    """Integer control from `minimum` to `maximum`."""
    minimum: int
    maximum: int
    value: int
    step: int = 1
    label: str = ""
    help: str = ""

    def widget(self, value, common):
        return widgets.IntSlider(value=value, min=self.minimum, max=self.maximum, step=self.step, **common)

    def grid(self) -> list:
        """Values a test drives through: the ends, their neighbours and the middle."""
        values = range(self.minimum, self.maximum + 1, self.step)
        return sorted({values[i] for i in (0, min(1, len(values) - 1), len(values) // 2, -1)} | {self.value})


@dataclass(frozen=True)
class LogSlider:
    """Real control on a logarithmic scale from 10**`low` to 10**`high`."""
    low: float
    high: float
    value: float
    step: float = 0.1
    label: str = ""
    help: str = ""

    def widget(self, value, common):
        return widgets.FloatLogSlider(value=value, base=10, min=self.low, max=self.high, step=self.step,
                                      readout_format=",.4r", **common)

    def grid(self) -> list:
        return sorted({10.0**self.low, 10.0**((self.low + self.high) / 2), 10.0**self.high, self.value})


@dataclass(frozen=True)
class Choice:
    """One of a few named options, chosen along a slider."""
    options: tuple
    value: object
    label: str = ""
    help: str = ""

    def widget(self, value, common):
        return widgets.SelectionSlider(value=value, options=self.options, **common)

    def grid(self) -> list:
        return list(self.options)


class Scene:
    """A picture that can be redrawn in place. A lesson subclasses it: `controls`, `build`, `update`, `describe`.

    controls: name -> Slider, LogSlider or Choice, in the order shown.
    size: of the figure in inches; redraw: controls that change axes, ticks or titles and so need everything drawn.
    build(): make the axes and artists on `self.figure`, once, and put every artist that moves on a layer.
    update(**values): set all artists from the values alone.
    describe(**values): one or two sentences that say what is seen, for the status line and the alt text.
    """
    controls: dict = {}
    size = (8.0, 4.5)
    redraw: tuple = ()

    def __init__(self):
        self._layers, self._backgrounds, self._shown = [], [], None
        with style.look():
            self.figure = style.figure(*self.size)
            self.build()
            self.update(**{name: control.value for name, control in self.controls.items()})
            self.figure.canvas.draw()
        self.figure.set_layout_engine("none")        # the layout is solved once, so axes never jump

    def build(self):
        raise NotImplementedError

    def update(self, **values):
        raise NotImplementedError

    def describe(self, **values) -> str:
        raise NotImplementedError

    def layer(self, *artists, on):
        """Put artists on the next layer up; `on` names the controls that change them."""
        on = {on} if isinstance(on, str) else set(on)
        unknown = (on | set(self.redraw)) - set(self.controls)
        if unknown:
            raise ValueError(f"no such control: {sorted(unknown)}; the scene has {list(self.controls)}")
        for artist in artists:
            artist.set_animated(True)
        self._layers.append((on, artists))

    def frame(self, **values) -> np.ndarray:
        """Pixels (height, width, 4) uint8 for these control values; a view that the next frame overwrites."""
        canvas = self.figure.canvas
        changed = set(values) if self._shown is None else {n for n in values if values[n] != self._shown[n]}
        if changed:
            with style.look():
                self.update(**values)
                if self._shown is None or changed & set(self.redraw):
                    self._draw_everything()
                else:
                    first = min((i for i, (on, _) in enumerate(self._layers) if on & changed), default=None)
                    if first is not None:
                        canvas.restore_region(self._backgrounds[first])
                        self._draw_layers(first)
            self._shown = dict(values)
        return np.asarray(canvas.buffer_rgba())

    def picture(self, **values) -> style.Picture:
        """The same picture as a static one; controls left out stand at their first value."""
        values = {name: control.value for name, control in self.controls.items()} | values
        return style.Picture(self.frame(**values), self.describe(**values))

    def _draw_everything(self):
        canvas = self.figure.canvas
        canvas.draw()
        self._backgrounds = [canvas.copy_from_bbox(self.figure.bbox)] + [None] * len(self._layers)
        self._draw_layers(0)

    def _draw_layers(self, first):
        canvas = self.figure.canvas
        for i, (_, artists) in enumerate(self._layers[first:], first):
            for artist in artists:
                (artist.axes or self.figure).draw_artist(artist)
            self._backgrounds[i + 1] = canvas.copy_from_bbox(self.figure.bbox)


class Explorer(widgets.VBox):
    """Sliders, one picture, one sentence. `explorer.<control>.value = ...` moves a slider from code.

    scene: a Scene subclass or instance. start: first values of its controls.
    Without a kernel a reader sees the picture as it stood when the notebook was saved, with the sentence as alt text.
    """

    # ipywidgets 7 shows widgets through _ipython_display_; None makes both 7 and 8 use _repr_mimebundle_.
    _ipython_display_ = None

    def __init__(self, scene, **start):
        self.scene = scene() if isinstance(scene, type) else scene
        self.picture = widgets.Image(format="png", layout=widgets.Layout(width="100%", max_width="800px"))
        self.status = widgets.HTML()
        self.sliders = {}
        for name, control in self.scene.controls.items():
            if hasattr(type(self), name):
                raise ValueError(f"a control cannot be named {name!r}: every widget has an attribute of that name")
            slider = control.widget(start.pop(name, control.value), dict(
                description=control.label or name, style={"description_width": "7em"},
                layout=widgets.Layout(width="380px", max_width="100%")))
            slider.set_trait("tooltip" if slider.has_trait("tooltip") else "description_tooltip",
                             control.help or control.label or name)
            slider.observe(self._redraw, names="value")
            self.sliders[name] = slider
        if start:
            raise TypeError(f"no such control: {sorted(start)}; the explorer has {list(self.sliders)}")
        super().__init__([
            widgets.HBox(list(self.sliders.values()), layout=widgets.Layout(flex_flow="row wrap")),
            self.picture, self.status])
        self._redraw()

    def __getattr__(self, name):
        sliders = self.__dict__.get("sliders", {})
        if name in sliders:
            return sliders[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def values(self) -> dict:
        """Name -> value of every control."""
        return {name: slider.value for name, slider in self.sliders.items()}

    @property
    def sentence(self) -> str:
        """What the picture shows now, in words."""
        return " ".join(self.scene.describe(**self.values).split())

    def _redraw(self, _=None):
        self.picture.value = style.live_png(self.scene.frame(**self.values))
        self.status.value = f'<span role="status" aria-live="polite">{html.escape(self.sentence)}</span>'

    def _repr_mimebundle_(self, include=None, exclude=None):
        if hasattr(self, "_handle_displayed"):       # ipywidgets 7
            self._handle_displayed()
        static = style.png(self.scene.frame(**self.values))
        bundle = style.mime_bundle(f"Explorer: {self.sentence}", self.sentence, static,
                                   "<p><em>This is a still picture. Run the cell for live sliders.</em></p>")
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return bundle | {"application/vnd.jupyter.widget-view+json": view}
