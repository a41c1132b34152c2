"""One JupyterLab and one browser for all browser tests; each lesson is opened and run once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    running = harness.Server(tmp_path_factory.mktemp("jupyter"))
    yield running
    running.close_kernels()
    running.stop()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A browser context with a fresh profile."""
    if not harness.CHROMIUM:
        pytest.fail("The browser tests need Chromium on the PATH: on Debian and Ubuntu `apt install chromium`.")
    with sync_playwright() as playwright:
        profile = tmp_path_factory.mktemp("profile")
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=harness.CHROMIUM, headless=True, args=harness.FLAGS)
        yield context
        context.close()


@pytest.fixture(scope="module", params=harness.NAMES)
def name(request):
    """Every lesson that has an explorer."""
    return request.param


@pytest.fixture(scope="module")
def lesson(server, browser, name):
    """A lesson after Run All."""
    page = harness.LessonPage(browser, server, name)
    page.seconds = page.run_all()
    yield page
    page.close()


@pytest.fixture
def open_lesson(server, browser):
    """Opens a lesson without running it: open_lesson(name, size=(width, height))."""
    pages = []

    def opened(name, **options):
        pages.append(harness.LessonPage(browser, server, name, **options))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()
