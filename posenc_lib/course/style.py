"""One look for every figure of the course, and pictures that carry their own description."""
import base64
import functools
import html
import io
import struct
import zlib

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

# Okabe and Ito's palette: told apart with every common kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW)
INK, GREY, LIGHT = "#222222", "#767676", "#D9D9D9"
HEAT = "viridis"

DPI = 100
LOOK = {
    "figure.dpi": DPI, "figure.facecolor": "white", "font.family": "DejaVu Sans", "font.size": 11,
    "axes.titlesize": 11, "axes.labelsize": 11, "axes.titlelocation": "left", "axes.edgecolor": GREY,
    "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS[:6]), "xtick.labelsize": 10, "ytick.labelsize": 10,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "legend.fontsize": 10, "legend.frameon": False,
    "lines.linewidth": 1.6, "image.cmap": HEAT, "image.interpolation": "nearest", "image.aspect": "auto",
    "mathtext.fontset": "dejavusans", "svg.hashsalt": "posenc", "axes.grid": False,
}


def look():
    """Context in which matplotlib draws in the course's style; leaves the user's own settings alone."""
    return matplotlib.rc_context(LOOK)


def figure(width: float = 8.0, height: float = 3.2, **options) -> Figure:
    """An Agg figure outside pyplot, so that nothing is shown twice and nothing piles up. Sizes in inches."""
    fig = Figure(figsize=(width, height), dpi=DPI, layout=options.pop("layout", "constrained"), **options)
    FigureCanvasAgg(fig)
    return fig


def heat_axes(ax):
    """An axes that holds a heat map: no frame over the pixels."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=3)
    return ax


def png(rgba: np.ndarray) -> bytes:
    """Small PNG (128 colours) of (height, width, 4) uint8 pixels, for pictures that are kept in a notebook."""
    out = io.BytesIO()
    Image.fromarray(rgba).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return out.getvalue()


def live_png(rgba: np.ndarray) -> bytes:
    """PNG of (height, width, 4) uint8 pixels, written for speed: no row filter, zlib level 1.

    Pillow tries five filters on every row, which takes half as long again - more than drawing the frame does.
    """
    height, width, _ = rgba.shape
    rows = np.zeros((height, width * 3 + 1), np.uint8)         # byte 0 of each row: filter type 0
    rows[:, 1:] = rgba[..., :3].reshape(height, -1)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 1)),
                     chunk(b"IEND", b"")))


def mime_bundle(text: str, alt: str, picture: bytes, caption: str = "") -> dict:
    """What a notebook stores for a picture: a sentence, an <img> with alt text, and the PNG that GitHub shows."""
    encoded = base64.b64encode(picture).decode()
    return {
        "text/plain": text,
        "text/html": f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}" style="max-width:100%">'
                     + caption,
        "image/png": encoded,
    }


def number(value: float) -> str:
    """A number as the course writes it in sentences: 10,000 rather than 1e+04, four digits where it is not whole."""
    value = float(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"


class Picture:
    """A still picture with alt text that says what it shows. image: a Figure, or pixels (height, width, 4) uint8."""

    def __init__(self, image: Figure | np.ndarray, alt: str):
        self.alt = " ".join(alt.split())
        if isinstance(image, Figure):
            image.canvas.draw()
            image = np.asarray(image.canvas.buffer_rgba())
        self.png = png(image)

    def __repr__(self):
        return f"Picture: {self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return mime_bundle(repr(self), self.alt, self.png)


def drawing(draw):
    """Decorator of a draw function (numbers in, Picture out): it draws in the course's look."""
    @functools.wraps(draw)
    def in_course_look(*args, **kwargs):
        with look():
            return draw(*args, **kwargs)
    return in_course_look
