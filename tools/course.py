"""Everything that one does with this course, on any system; the Makefile only calls this file.

    python3 tools/course.py lab          open the lessons in JupyterLab (--port 8890, --no-browser)
    python3 tools/course.py test         unit tests, then every notebook, compared with its committed outputs
    python3 tools/course.py venv         only make .venv, or renew it after the pinned versions changed
    python3 tools/course.py bench        the timings in tests/benchmarks
    python3 tools/course.py browser      the lessons in a real browser (needs Chromium)
    python3 tools/course.py notebooks    execute, clean and stamp notebooks (names and options go to tools/notebooks.py)
    python3 tools/course.py figures      draw the pictures in figures/ again
    python3 tools/course.py publish REPO=owner/name TAG=v1   stamp the public address into notebooks and README
    python3 tools/course.py clean        remove .venv and caches, never workbook/

Each command makes .venv first where that is needed. CPU=1 in the environment, or --cpu, takes torch's CPU wheel when
.venv is made. Only the standard library is used, and nothing newer than Python 3.8 up to the point where a Python
that is too old is told apart; what cannot be done is said in one sentence.
"""
import argparse
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "course-stamp.json"  # written last: a .venv without it, or with another key, is made again
LOG = ROOT / ".venv-build.log"
LOCK = ROOT / ".venv.lock"
WINDOWS = os.name == "nt"
VERSION = ".".join(map(str, sys.version_info[:2]))

MINIMUM = (3, 11)
NEWER = (13, 12, 11, 14)  # minor versions looked for when the running Python is too old
GIGABYTES = 2.0  # what .venv takes with torch's CPU wheel
SPACE = "2 GB (on Linux about 8 GB with torch's default wheel, which brings CUDA; CPU=1 avoids that)"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# What `venv` installs, as pip's arguments from the repository's root; environment.yml says the same.
INSTALL = ["-c", "constraints.txt", "-e", ".[lab,test]"]
INSTALL_BROWSER = ["-c", "constraints.txt", "-e", ".[browser]"]

# Modules are compiled when they are first imported: compiling all of them here would take minutes.
PIP_INSTALL = ["pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
PARALLEL = ["-n", "2", "--dist", "loadfile"]

NO_SPACE = re.compile(
    r"No space left on device|\[Errno 28\]|WinError 112|not enough space on the disk|Disk quota", re.IGNORECASE
)
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeoutError|ConnectionError|Connection refused|Connection broken|Connection aborted"
    r"|Temporary failure in name resolution|Name or service not known|nodename nor servname|getaddrinfo failed"
    r"|Failed to resolve|Network is unreachable|No route to host|ReadTimeoutError|Read timed out|ProxyError"
    r"|SSLError|Max retries exceeded",
    re.IGNORECASE,
)


class Stop(Exception):
    """Ends the command; its text is the one sentence that says why and what to do."""


# ---------------------------------------------------------------------------------------------- which Python

def newer_python():
    """A command (list) that starts a Python new enough, looked for on PATH; None if there is none."""
    probe = f"import sys; print(sys.executable); sys.exit(sys.version_info < {MINIMUM!r})"
    for minor in NEWER:
        for command in [[f"python3.{minor}"]] + ([["py", f"-3.{minor}"]] if WINDOWS else []):
            path = shutil.which(command[0])
            if path is None:
                continue
            found = subprocess.run([path] + command[1:] + ["-c", probe], check=False, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if found.returncode == 0 and found.stdout.strip():
                return [found.stdout.strip()]
    return None


def use_new_enough_python(arguments):
    """Go on under a newer Python if this one is too old. Raises Stop if there is none."""
    if sys.version_info >= MINIMUM:
        return
    command = newer_python()
    if command is None:
        raise Stop(f"The course needs Python 3.11 or newer, and this is {VERSION}: install a newer one (python.org, or "
                   "your system's packages), then run this again with it.")
    replace_process(command + [str(Path(__file__).resolve())] + arguments, os.environ)


def replace_process(command, environment):
    """Run `command` in this process's place; never returns."""
    sys.stdout.flush()
    if WINDOWS:
        sys.exit(subprocess.call(command, env=environment))
    os.execve(command[0], command, environment)


# ---------------------------------------------------------------------------------------------- .venv

def venv_python():
    """The Python of .venv."""
    return VENV / ("Scripts/python.exe" if WINDOWS else "bin/python")


def venv_environment(**extra):
    """Environment variables for whatever runs in .venv: nothing from other Pythons, .venv's programs first."""
    # .venv is installed without compiled modules, so they must be written when they are first imported.
    strangers = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in strangers}
    environment["VIRTUAL_ENV"] = str(VENV)
    environment["PATH"] = str(venv_python().parent) + os.pathsep + environment.get("PATH", "")
    environment["JUPYTER_PREFER_ENV_PATH"] = "1"
    environment["PIP_USER"] = "0"
    environment.update(extra)
    return environment


def pins_key():
    """A hash of all that .venv is made from: pins, requirements, Python's minor version and where the course lies."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = {
        "constraints": (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n"),
        "dependencies": project["dependencies"],
        "extras": project["optional-dependencies"],
        "install": INSTALL,
        "python": VERSION,
        "root": str(ROOT),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_stamp():
    """What the stamp says, or {} if there is no good one."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp):
    """Write the stamp, whole or not at all."""
    part = STAMP.with_suffix(".part")
    part.write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    os.replace(str(part), str(STAMP))


def torch_pin():
    """The requirement "torch==..." of constraints.txt."""
    return re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE).group()


def install_steps(cpu):
    """The `pip install` argument lists that fill .venv, in order."""
    steps = [INSTALL]
    if cpu:  # the later step finds torch there and keeps it
        steps.insert(0, ["--no-deps", "--index-url", CPU_INDEX, torch_pin()])
    return steps


def run_logged(command):
    """Run a command from the root; its output goes to the log. Returns (exit status, output)."""
    process = subprocess.Popen(command, cwd=str(ROOT), env=venv_environment(), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    lines = []
    show = sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        log = None
        with contextlib.suppress(OSError):
            log = stack.enter_context(open(str(LOG), "ab", buffering=0))
            log.write(f"\n$ {' '.join(command)}\n".encode())
        for line in process.stdout:
            lines.append(line.decode("utf-8", "replace"))
            with contextlib.suppress(OSError):
                if log:
                    log.write(line)
            if show and lines[-1].strip():
                print(f"\r  {lines[-1].strip():<77.77}", end="", flush=True)
        status = process.wait()
    if show:
        print("\r" + 79 * " " + "\r", end="", flush=True)
    return status, "".join(lines)


def pip_install(arguments):
    """`pip install` into .venv. Raises Stop with the reason if it fails."""
    status, output = run_logged([str(venv_python()), "-m"] + PIP_INSTALL + arguments)
    if status:
        raise Stop(explain(output))


def explain(output):
    """One sentence for pip's (or venv's) failure, from what it printed."""
    if NO_SPACE.search(output):
        return f"There is no space left on the disk: .venv needs {SPACE}; make room and run this again."
    if NO_NETWORK.search(output):
        return ("pip cannot reach the package index: check the network or the proxy and run this again "
                f"(log: {LOG.name}).")
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        return (f"pip finds no {missing.group(1)} for Python {VERSION} on this system: try another Python from 3.11 to "
                f"3.13, or open the lessons in Colab (log: {LOG.name}).")
    return f"pip could not install what the course needs: the reason is at the end of {LOG.name}."


def try_lock(file):
    """Lock an open file for this process; False if another one holds it."""
    try:
        if WINDOWS:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def one_at_a_time():
    """Held while .venv is made or renewed; a second command waits."""
    with open(str(LOCK), "a+") as lock:
        if not try_lock(lock):
            print("Waiting for another command that is making .venv ...", flush=True)
            while not try_lock(lock):
                time.sleep(0.5)
        yield  # closing the file frees the lock


def build_venv(cpu):
    """Make .venv anew. Raises Stop if that fails, and then leaves none."""
    base = getattr(sys, "_base_executable", None) or sys.executable  # not the .venv that is being replaced
    if subprocess.call([base, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL):
        raise Stop(f"Python {VERSION} at {base} has no venv module: install it (Debian and Ubuntu: sudo apt install "
                   f"python{VERSION}-venv) and run this again.")
    if VENV.exists():
        print("Removing the old .venv ...", flush=True)
        remove(VENV)
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    if free < GIGABYTES:
        raise Stop(f"There is too little space on the disk, {free:.1f} GB: .venv needs {SPACE}; make room and run this "
                   "again.")
    torch = " and torch for the CPU" if cpu else ""
    print(f"Making .venv with Python {VERSION}{torch}: some minutes (log: {LOG.name}) ...", flush=True)
    start = time.time()
    with contextlib.suppress(OSError):
        LOG.unlink()
    try:
        status, output = run_logged([base, "-m", "venv", str(VENV)])
        if status:
            raise Stop(explain(output) if NO_SPACE.search(output) else
                       f"Python's venv module could not make .venv: the reason is at the end of {LOG.name}.")
        for arguments in install_steps(cpu):
            pip_install(arguments)
        write_stamp({"key": pins_key(), "cpu": cpu})
    except BaseException:
        remove(VENV)
        raise
    print(f".venv is ready after {time.time() - start:.0f} s.", flush=True)


def ensure_venv(cpu=False, browser=False):
    """Make .venv if it is absent, half made, or made from other pins; `browser`: with the browser tests' packages."""
    with one_at_a_time():
        stamp = read_stamp()
        if stamp.get("key") != pins_key() or not venv_python().exists():
            build_venv(cpu or bool(stamp.get("cpu")))
        elif cpu and not stamp.get("cpu"):
            print("CPU=1 counts when .venv is made; this one stays. To change it: `make clean`, then again.")
        stamp = read_stamp()
        if browser and not stamp.get("browser"):
            pip_install(INSTALL_BROWSER)
            write_stamp(dict(stamp, browser=True))


def remove(path):
    """Remove a file or folder if it is there. Raises Stop where another program holds it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        elif path.exists() or path.is_symlink():
            path.unlink()
    except PermissionError as error:
        raise Stop(f"{error.filename} cannot be removed: close JupyterLab and whatever else uses it, then run this "
                   "again.") from None


# ---------------------------------------------------------------------------------------------- commands

def run(arguments, **environment):
    """Run .venv's Python with these arguments from the root; return the exit status."""
    sys.stdout.flush()
    return subprocess.call([str(venv_python())] + [str(a) for a in arguments], cwd=str(ROOT),
                           env=venv_environment(**environment))


def venv(options):
    """Make .venv if needed."""
    ensure_venv(options.cpu)
    print(f"The course's Python: {venv_python().relative_to(ROOT)}")
    return 0


def lab(options):
    """Open the working copy of the lessons in JupyterLab."""
    import workbook  # tools/workbook.py

    ensure_venv(options.cpu)
    try:
        news = workbook.update(ROOT / "notebooks", ROOT / "workbook")
    except ValueError as error:
        raise Stop(f"The working copy cannot be made: {error}.") from None
    print("".join(f"{line}\n" for line in news), end="")
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    if not lessons:
        raise Stop("There is no lesson in notebooks/: get the whole course folder and run this again.")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", options.port)) == 0:
            print(f"Port {options.port} is taken; JupyterLab takes another one.")
    print("JupyterLab prints its address below. To stop it: Ctrl-C, then y.\n")
    command = [
        str(venv_python()), "-m", "jupyterlab", "--log-level=WARN",
        f"--LabApp.default_url=/lab/tree/workbook/{lessons[0].name}", f"--ServerApp.root_dir={ROOT}",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={options.port}",
        "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    if options.no_browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # a container; the server listens on 127.0.0.1 only
        command.append("--allow-root")
    os.chdir(str(ROOT))
    replace_process(command, venv_environment())


def test(options):
    """Unit tests, then every notebook; fails if any fails or if there are none."""
    start = time.time()
    ensure_venv(options.cpu)
    ready = time.time() - start
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    nbval = ["--nbval", "--nbval-sanitize-with", "tests/notebooks/sanitize.cfg"]
    parts = {
        "unit tests": ["tests"],
        f"notebooks ({len(notebooks)})": nbval + [path.relative_to(ROOT) for path in notebooks],
    }
    lines, failed = [], False
    for name, arguments in parts.items():
        print(f"\n=== {name}", flush=True)
        begin = time.time()
        if arguments[0] == "--nbval" and not notebooks:
            status = 5
        else:
            status = run(["-m", "pytest", "-q"] + PARALLEL + arguments, **ONE_THREAD)
        # pytest says 5 where it found no test, which is a failure here
        word = {0: "passed", 5: "FAILED: none found"}.get(status, "FAILED")
        failed = failed or status != 0
        lines.append(f"{name:<16} {word:<20} {time.time() - begin:6.1f} s")
    print("\n=== summary")
    print("\n".join([f"{'.venv':<16} {'ready':<20} {ready:6.1f} s"] + lines))
    print(f"{'FAILED' if failed else 'All passed'} in {time.time() - start:.0f} s", flush=True)
    return 1 if failed else 0


def bench(options):
    """Every tests/benchmarks/bench_*.py; each prints its table."""
    ensure_venv(options.cpu)
    files = sorted((ROOT / "tests" / "benchmarks").glob("bench_*.py"))
    if not files:
        raise Stop("There is no tests/benchmarks/bench_*.py to run.")
    failed = False
    for path in files:
        print(f"\n=== {path.stem}", flush=True)
        failed = run([path], **ONE_THREAD) != 0 or failed
    return 1 if failed else 0


def browser(options):
    """The tests in tests/browser."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))):
        raise Stop("The browser tests need Chromium: install it (Debian and Ubuntu: sudo apt install chromium) "
                   "and run this again.")
    ensure_venv(options.cpu, browser=True)
    return run(["-m", "pytest", "-q", "tests/browser"], **ONE_THREAD)


def tool(name):
    """A command that hands its arguments to tools/<name>.py in .venv."""
    def command(options):
        path = ROOT / "tools" / f"{name}.py"
        if not path.exists():
            raise Stop(f"There is no {path.relative_to(ROOT)} in this copy of the course.")
        ensure_venv(options.cpu)
        return run([path] + options.arguments, **ONE_THREAD)
    return command


def clean(options):
    """Remove .venv, logs and caches; the learner's workbook/ stays."""
    with one_at_a_time():
        for name in (".venv", LOG.name, "build", "dist", "posenc_lib.egg-info", ".pytest_cache", ".ruff_cache",
                     ".hypothesis"):
            remove(ROOT / name)
        for folder in ("posenc_lib", "tests", "tools"):
            for cache in sorted((ROOT / folder).rglob("__pycache__")):
                remove(cache)
    print("Removed .venv and caches. Your work in workbook/ is untouched.")
    return 0


COMMANDS = {
    "venv": venv, "lab": lab, "test": test, "bench": bench, "browser": browser, "notebooks": tool("notebooks"),
    "figures": tool("figures"), "publish": tool("publish"), "clean": clean,
}


def switched_on(name):
    """Whether an environment variable is set to something other than 0 or no."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "no", "false")


def port_number(word):
    """A TCP port from the command line or the environment."""
    if not 0 <= int(word) < 65536:
        raise ValueError(word)
    return int(word)


def parse(arguments):
    """The options of the command line; variables of the environment (CPU, PORT, NO_BROWSER) are their defaults."""
    parser = argparse.ArgumentParser(prog="course.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--cpu", action="store_true", default=switched_on("CPU"), help="torch's CPU wheel (or CPU=1)")
    parser.add_argument("--port", type=port_number, default=os.environ.get("PORT") or 8888, help="lab: where to listen")
    parser.add_argument("--no-browser", action="store_true", default=switched_on("NO_BROWSER"),
                        help="lab: do not open a browser")
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("notebooks", "figures", "publish"):
        parser.error("unknown: " + " ".join(rest))
    options.arguments = rest
    return options


def main(arguments):
    try:
        use_new_enough_python(arguments)
        options = parse(arguments)
        return COMMANDS[options.command](options)
    except Stop as stop:
        print(stop, file=sys.stderr)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            print(explain("No space left on device"), file=sys.stderr)
        else:
            print(f"Cannot go on: {error}.", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
