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


def measure(explorer):
    """{control: milliseconds from key press to changed pixels, for 40 presses}."""
    measured = {}
    for wanted in harness.TARGETS:
        handle = control(explorer, wanted)
        explorer.latencies(handle, 3)
        measured[wanted] = explorer.latencies(handle, 40)
    return measured


@pytest.fixture(scope="module")
def rounds(explorer, pytestconfig):
    """Up to three rounds of measurements, until one is fast enough: what else the machine does only adds time."""
    found = []
    for attempt in range(3):
        time.sleep(5 * attempt)
        found.append(measure(explorer))
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nkey press to changed pixels, ms (40 presses each, load {os.getloadavg()[0]:.1f})")
            print(f"{'control':10} {'median':>7} {'p95':>7} {'target p95':>11}")
            for wanted, times in found[-1].items():
                print(f"{wanted:10} {statistics.median(times):7.0f} {p95(times):7.0f} {harness.TARGETS[wanted]:11}")
        if not too_slow(found[-1]):
            break
    return found


def too_slow(measured):
    return [wanted for wanted, times in measured.items() if p95(times) > harness.ALLOWANCE * harness.TARGETS[wanted]]


def test_key_press_to_changed_pixels(rounds):
    assert too_slow(rounds[-1]) == [], f"{len(rounds)} rounds, all slower than {harness.ALLOWANCE} times the target"


@pytest.mark.parametrize("wanted", harness.TARGETS)
def test_a_held_key_is_followed(explorer, rounds, wanted, capsys):
    """When the key is released, the frame being drawn and the last one are still to come, and no more."""
    frames, behind = explorer.hold(control(explorer, wanted))
    with capsys.disabled():
        print(f"\n{wanted}: 40 presses in 1.2 s: {frames} frames, the last one {behind:.0f} ms after the last press")
    assert frames >= 4
    assert behind <= 2 * max(p95(rounds[-1][wanted]), harness.ALLOWANCE * harness.TARGETS[wanted])
