"""Lesson 03's explorer answers a key press under the eye's threshold, and keeps up with a held key."""

import os
import statistics
import time

import harness
import pytest

NAME = "03_sinusoidal"


@pytest.fixture(scope="module")
def explorer(server, browser):
    page = harness.LessonPage(browser, server, NAME)
    page.run_all()
    assert page.errors() == []
    (first, *_) = page.explorers()
    first.show()
    yield first
    page.close()


def control(explorer, wanted):
    """The handle of the slider whose label contains a name."""
    return next(handle for label, handle in explorer.sliders().items() if wanted in label.replace(" ", "_"))


def p95(times):
    return sorted(times)[int(0.95 * len(times))]


def test_key_press_to_changed_pixels(explorer, capsys):
    """Another program that takes a core only ever adds time, so a round that is too slow is measured again."""
    for attempt in range(3):
        measured = {}
        for wanted in harness.TARGETS:
            handle = control(explorer, wanted)
            explorer.latencies(handle, 3)
            measured[wanted] = explorer.latencies(handle, 40)
        with capsys.disabled():
            print(f"\nkey press to changed pixels, ms (40 presses each, load {os.getloadavg()[0]:.1f})")
            print(f"{'control':10} {'median':>7} {'p95':>7} {'target p95':>11}")
            for wanted, times in measured.items():
                print(f"{wanted:10} {statistics.median(times):7.0f} {p95(times):7.0f} {harness.TARGETS[wanted]:11}")
        slow = [wanted for wanted, times in measured.items()
                if p95(times) > harness.ALLOWANCE * harness.TARGETS[wanted]]
        if not slow:
            return
        time.sleep(5 * attempt)
    raise AssertionError(f"three rounds, each slower than {harness.ALLOWANCE} times the target; the last for {slow}")


@pytest.mark.parametrize("wanted", harness.TARGETS)
def test_a_held_key_is_followed(explorer, wanted, capsys):
    frames, behind = explorer.hold(control(explorer, wanted))
    with capsys.disabled():
        print(f"\n{wanted}: 40 presses in 1.2 s: {frames} frames, the last one {behind:.0f} ms after the last press")
    assert frames >= 4
    assert behind <= 2 * harness.ALLOWANCE * harness.TARGETS[wanted], "at most one frame behind"
