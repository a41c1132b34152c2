"""Draws every picture in figures/ again: `make figures`. README and the lessons show them.

Pixels depend on matplotlib's minor version, so run it with the pinned one (`make figures` does).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from posenc_lib.course.lessons import sinusoidal  # noqa: E402

FIGURES = {
    "encoding.png": lambda: sinusoidal.EncodingScene().picture(d_model=64, position=50),
}


def main(folder=ROOT / "figures"):
    folder.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        picture = draw()
        (folder / name).write_bytes(picture.png)
        print(f"{name}: {len(picture.png) // 1024} KB. {picture.alt}")


if __name__ == "__main__":
    main()
