"""JupyterLab on this machine, and a browser that reads lessons in it the way a person does: menu, Tab, arrow keys."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from playwright.sync_api import Error

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    path.stem for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if any("explorer" in cell["metadata"].get("tags", []) for cell in json.loads(path.read_text("utf-8"))["cells"])
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]

# Milliseconds from key press to changed pixels, at most, for 95 of 100 presses; CI may take half as much again.
TARGETS = {"position": 120, "base": 120, "d_model": 250}
ALLOWANCE = 1.5


class Server:
    """JupyterLab on a free port of 127.0.0.1, working on a copy of the course in `folder`."""

    def __init__(self, folder):
        self.course = folder / "course"
        for name in ("notebooks", "figures", "posenc_lib"):
            if (ROOT / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
                shutil.copytree(ROOT / name, self.course / name, ignore=ignore)
        settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.token = os.urandom(16).hex()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
                       "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}
        for name in ("CONFIG", "DATA", "RUNTIME"):
            environment[f"JUPYTER_{name}_DIR"] = str(folder / name.lower())
        self.log = folder / "jupyterlab.log"
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
                   f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.course}",
                   f"--IdentityProvider.token={self.token}", "--LabApp.expose_app_in_browser=True"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=self.course, env=environment, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 90
        while True:
            try:
                self.api("status")
                return
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-3000:]}") from None
                time.sleep(0.2)

    def api(self, path, method="GET"):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read() or "null")

    def close_kernels(self):
        for session in self.api("sessions"):
            self.api(f"sessions/{session['id']}", "DELETE")

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


# In the page: whether a notebook of so many cells is open and its kernel idle.
READY = """([name, cells]) => {
  const panel = window.jupyterapp && window.jupyterapp.shell && window.jupyterapp.shell.currentWidget;
  if (!panel || !panel.context || !panel.context.path.endsWith(name + '.ipynb') || !panel.context.isReady) return false;
  const session = panel.sessionContext.session;
  return panel.content.widgets.length === cells && !!session && !!session.kernel && session.kernel.status === 'idle';
}"""

# In the page: the notebook's model, its cells, and the time from a key press to changed pixels.
SCRIPT = r"""
window.course = {
  notebook() { return window.jupyterapp.shell.currentWidget.content; },
  cells() { return this.notebook().widgets.map(cell => {
      const tags = cell.model.getMetadata('tags') || [], code = cell.model.type === 'code';
      const outputs = code ? cell.model.outputs.toJSON() : [];
      return {tags, code, source: cell.model.sharedModel.getSource(), count: code ? cell.model.executionCount : null,
              errors: outputs.filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue),
              stderr: outputs.filter(o => o.name === 'stderr').map(o => [].concat(o.text).join(''))}; }); },
  explorers() { return this.notebook().widgets.map((cell, i) => i).filter(i =>
      (this.notebook().widgets[i].model.getMetadata('tags') || []).includes('explorer')); },
  async show(index) {  // scroll until the cell's picture is on the screen; pictures above it may load and push it away
      const notebook = this.notebook(), node = notebook.widgets[index].node;
      node.dataset.cell = index;
      for (let quiet = 0, tries = 0; quiet < 3 && tries < 200; tries++) {
        const image = node.querySelector('.jp-OutputArea-output img');
        const box = image ? image.getBoundingClientRect() : {height: 0};
        if (image && image.complete && box.height > 50 && box.top < innerHeight - 50 && box.bottom > 50) quiet++;
        else { quiet = 0; await notebook.scrollToItem(index, 'start'); }
        await new Promise(resolve => setTimeout(resolve, 100));
      } },
  watch(image) { this.image = image; this.shown = image.src; this.pressed = null;
      this.done = new Promise(resolve => {
        document.addEventListener('keydown', () => { this.pressed = performance.now(); }, {capture: true, once: true});
        const start = performance.now();
        const tick = async () => {
          if (this.pressed !== null && image.src !== this.shown && image.complete && image.naturalWidth) {
            try { await image.decode(); } catch (error) {}
            requestAnimationFrame(() => { const channel = new MessageChannel();
              channel.port1.onmessage = () => resolve(performance.now() - this.pressed);
              channel.port2.postMessage(0); });
          } else if (performance.now() - start > 5000) resolve(null);
          else requestAnimationFrame(tick);
        };
        requestAnimationFrame(tick); }); },
  follow(image) { const state = this.state = {frames: 0, last: performance.now(), src: image.src, run: true};
      const tick = () => { if (image.src !== state.src && image.complete && image.naturalWidth) {
          state.src = image.src; state.frames += 1; state.last = performance.now(); }
        if (state.run) requestAnimationFrame(tick); };
      requestAnimationFrame(tick); },
};
"""


class LessonPage:
    """One lesson, open in JupyterLab in a page of its own."""

    def __init__(self, context, server, name, size=(1400, 1100)):
        server.close_kernels()
        self.name, self.page = name, context.new_page()
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        address = f"http://127.0.0.1:{server.port}/lab/tree/notebooks/{name}.ipynb?token={server.token}&reset"
        self.page.goto(address, wait_until="domcontentloaded")
        cells = len(json.loads((server.course / "notebooks" / f"{name}.ipynb").read_text("utf-8"))["cells"])
        deadline = time.monotonic() + 120
        while not self.ready(name, cells):
            self.accept_dialog()
            assert time.monotonic() < deadline, f"{name} did not open, or its kernel did not start"
            time.sleep(0.1)
        self.page.evaluate(SCRIPT)
        self.page.evaluate("jupyterapp.shell.collapseLeft()")

    def ready(self, name, cells):
        try:
            return self.page.evaluate(READY, [name, cells])
        except Error:  # the page is still on its way to its final address
            return False

    def accept_dialog(self):
        button = self.page.locator(".jp-Dialog .jp-mod-accept")
        if button.count():
            button.first.click()

    def cells(self):
        return self.page.evaluate("course.cells()")

    def errors(self):
        """What went wrong, as far as a reader sees it: error outputs, warnings, broken widgets."""
        wrong = [error for cell in self.cells() for error in cell["errors"] + cell["stderr"]]
        for text in ("Error displaying widget", "Error creating widget", "model not found", "Javascript Error"):
            wrong += [text] * self.page.locator(f".jp-OutputArea >> text={text}").count()
        return wrong

    def run_all(self, timeout=180):
        """Run > Run All Cells; return the seconds until the last cell has run. Stops at the first error output."""
        self.page.evaluate("jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        self.page.wait_for_function("course.cells().every(cell => cell.count === null)")
        start = time.monotonic()
        self.page.click("div.lm-MenuBar-itemLabel:text-is('Run')")
        self.page.click("li[data-command='runmenu:run-all']")
        done = "(() => { const cells = course.cells().filter(cell => cell.code && cell.source.trim());" \
               " return cells.every(cell => cell.count !== null) || cells.some(cell => cell.errors.length); })()"
        self.page.wait_for_function(done, timeout=1000 * timeout, polling=50)
        seconds = time.monotonic() - start
        return seconds

    def explorers(self):
        return [ExplorerView(self.page, index) for index in self.page.evaluate("course.explorers()")]

    def screenshot(self, label):
        """Into the folder that POSENC_SHOTS names (1: tests/browser/shots), if it is set."""
        folder = os.environ.get("POSENC_SHOTS")
        if folder:
            folder = Path(__file__).with_name("shots") if folder == "1" else Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=folder / f"{self.name}_{label}.png")

    def close(self):
        self.page.close()


class ExplorerView:
    """One explorer as it stands in the page."""

    def __init__(self, page, index):
        self.page, self.index = page, index
        self.cell = page.locator(f"[data-cell='{index}']")

    def show(self):
        """Scroll to it; wait until its picture is on the screen."""
        self.page.evaluate("index => course.show(index)", self.index)
        self.cell.locator(".jp-OutputArea-output img").first.wait_for(state="visible")

    @property
    def image(self):
        return self.cell.locator(".jp-OutputArea-output img.widget-image")

    def sliders(self):
        """{label: handle} of every slider."""
        found = {}
        for handle in self.cell.locator("[role=slider]").all():
            label = handle.evaluate("h => h.closest('.widget-inline-hbox').querySelector('.widget-label').textContent")
            found[label.strip()] = handle
        return found

    def seen(self):
        """(address of the picture, text of the status line)."""
        return self.image.get_attribute("src"), self.cell.locator("[role=status]").inner_text()

    def press(self, handle, key):
        """Press a key on a slider's handle; wait until picture and status line have changed.

        Raises AssertionError when they do not; returns False, without waiting, when the slider is at that end.
        """
        before, value = self.seen(), handle.get_attribute("aria-valuenow")
        handle.focus()
        self.page.keyboard.press(key)
        if handle.get_attribute("aria-valuenow") == value:
            return False
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            after = self.seen()
            if after[0] != before[0] and after[1] != before[1]:
                return True
            time.sleep(0.02)
        raise AssertionError(f"{key} moved the slider; picture changed: {after[0] != before[0]}, "
                             f"status changed: {after[1] != before[1]}: {after[1]!r}")

    def latencies(self, handle, presses, gap=0.12):
        """Milliseconds from key press to changed pixels, one per press; turns round at the ends of the slider."""
        key, other, times = "ArrowRight", "ArrowLeft", []
        handle.focus()
        for _ in range(presses):
            if handle.get_attribute("aria-valuenow") == handle.get_attribute(
                    "aria-valuemax" if key == "ArrowRight" else "aria-valuemin"):
                key, other = other, key
            self.image.evaluate("image => course.watch(image)")
            self.page.keyboard.press(key)
            times.append(self.page.evaluate("course.done"))
            assert times[-1] is not None, "no new picture within 5 s"
            time.sleep(gap)
        return times

    def hold(self, handle, presses=40, gap=0.03):
        """Press as a held key does; return (frames shown, milliseconds from the last press to the last frame)."""
        handle.focus()
        self.page.keyboard.press("Home")
        time.sleep(1)
        self.image.evaluate("image => course.follow(image)")
        start = time.monotonic()
        for i in range(presses):
            self.page.keyboard.press("ArrowRight")
            time.sleep(max(0.0, start + (i + 1) * gap - time.monotonic()))
        end = self.page.evaluate("performance.now()")
        time.sleep(3)
        state = self.page.evaluate("(() => { course.state.run = false; return course.state; })()")
        return state["frames"], state["last"] - end
