"""The pictures in figures/: all made by one command, all of them used, none too large."""
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_figures_are_those_the_command_draws(tmp_path):
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools/figures.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "figures").iterdir()} == set(tool.FIGURES)
    assert all(path.stat().st_size <= 150 * 1024 for path in (ROOT / "figures").iterdir())


def test_every_picture_in_the_readme_exists_and_is_described():
    pictures = re.findall(r"!\[([^\]]*)\]\((figures/[^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert pictures
    for alt, path in pictures:
        assert (ROOT / path).is_file() and len(alt) >= 40
