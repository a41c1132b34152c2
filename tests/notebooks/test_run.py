"""Every notebook runs from top to bottom in a fresh kernel, and once more in the same kernel, and says the same."""

import configparser
import copy
import os
import re
import time
from pathlib import Path

import pytest

import notebooks as tool

SECONDS = {"12_experiment": 120}  # one "Run All" on two cores; other lessons: 20
SANITIZE = configparser.RawConfigParser()
SANITIZE.read(Path(__file__).with_name("sanitize.cfg"), encoding="utf-8")


def said(nb):
    """Per cell, the text that nbval compares: streams, text/plain and text/html, sanitised."""
    texts = []
    for cell in nb.cells:
        text = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text += output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
        for section in SANITIZE.sections():
            text = re.sub(SANITIZE[section]["regex"], SANITIZE[section]["replace"], text)
        texts.append("" if "nbval-ignore-output" in tool.tags(cell) else text)
    return texts


@pytest.mark.parametrize("path", tool.paths(), ids=lambda path: path.stem)
def test_run_all_twice_in_one_kernel(path):
    nb = tool.read(path)
    committed = said(nb)
    rounds = []

    def after_each(nb):
        rounds.append((time.perf_counter(), said(copy.deepcopy(nb))))

    start, before = time.perf_counter(), os.times()
    tool.run(nb, path.parent, times=2, after_each=after_each)
    first, after = rounds[0][0] - start, os.times()
    busy = after.children_user - before.children_user + after.children_system - before.children_system
    print(f"{path.stem}: Run All {first:.1f} s, again {rounds[1][0] - rounds[0][0]:.1f} s; processor {busy:.1f} s")
    assert rounds[0][1] == committed
    assert rounds[1][1] == committed
    # On a machine that does other things too, the processor time of both rounds stands for the time of one.
    assert min(first, busy) <= SECONDS.get(path.stem, 20)
