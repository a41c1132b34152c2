"""The one source of the setup cell that opens every lesson.

The cell uses `posenc_lib` where it can be imported, else where it lies beside or above the notebook, else installs it
without touching torch, numpy or ipywidgets, else stops "Run All" with one sentence that says what to do.
tools/notebooks.py stamps it into the notebooks, with the public address that `make publish` has set.
"""

READY = "posenc_lib is ready\n"

TEMPLATE = '''\
# Finds the course's library, or installs it and nothing else. Every lesson opens with this cell.
import os
import sys
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from subprocess import run

REPOSITORY, TAG = "<REPOSITORY>", "<TAG>"
GIT, ZIP = f"git+https://github.com/{REPOSITORY}@{TAG}", f"https://github.com/{REPOSITORY}/archive/{TAG}.zip"
SOURCE = os.environ.get("POSENC_SOURCE") or (REPOSITORY and (GIT if which("git") else ZIP))
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps", SOURCE]
HELP = "get the whole course folder and run `make lab` in it (or pip install, or set POSENC_SOURCE to its address)"
class SetupStopped(Exception):
    def _render_traceback_(self):
        return [str(self)]
if not find_spec("posenc_lib"):
    sys.path += [str(p) for p in (Path.cwd(), *Path.cwd().parents) if (p / "posenc_lib/__init__.py").is_file()][:1]
if SOURCE and not find_spec("posenc_lib") and run(PIP, check=False, capture_output=True).returncode:
    HELP = f"pip could not install {SOURCE}, so check the network and the address"
invalidate_caches()
if missing := [name for name in ("posenc_lib", "torch", "numpy", "matplotlib", "ipywidgets") if not find_spec(name)]:
    raise SetupStopped(f"Cannot find {', '.join(missing)}: {HELP}, then restart and run this cell again.")
print("posenc_lib is ready")
'''


def render(repository="", tag=""):
    """The setup cell's source for a published `repository` ("owner/name") and `tag`; both empty: not published."""
    return TEMPLATE.replace("<REPOSITORY>", repository).replace("<TAG>", tag).rstrip("\n")
