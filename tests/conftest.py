"""What all unit tests share: settings, the stored oracle values, exact arithmetic, and mutated copies of a module."""
import contextlib
import importlib
import inspect
import json
import pathlib
import types

import mpmath
import pytest
import torch
from hypothesis import Phase, settings

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401   torch.compile would import it half way through a graph, where it now and then fails

settings.register_profile("course", derandomize=True, database=None, deadline=None, max_examples=40,
                          report_multiple_bugs=False)
settings.register_profile("mutants", settings.get_profile("course"), phases=[Phase.generate])      # no shrinking
settings.load_profile("course")
torch.set_num_threads(1)

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device of this machine in turn."""
    return request.param


@pytest.fixture(scope="session")
def golden():
    """Values from independent implementations of the papers, each with its inputs."""
    return json.loads((pathlib.Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def exact_angle():
    """position * base**(-2i/dim) with 60 digits; mpmath's sin and cos of it are exact for any float's purposes."""
    mpmath.mp.dps = 60
    frequency = {}

    def angle(position, i, dim, base=10000.0):
        if (i, dim, base) not in frequency:
            frequency[i, dim, base] = mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / dim)
        return position * frequency[i, dim, base]

    return angle


@pytest.fixture
def mutant():
    """mutant("attention", old, new): that module with one piece of its source replaced; the original stays as it is.

    Further keywords replace names that the module imports. A test that still passes on a mutant checks too little.
    """
    def build(name, old, new, **names):
        module = importlib.import_module(f"posenc_lib.{name}")
        source = inspect.getsource(module)
        if source.count(old) != 1:                   # no AssertionError, which would pass for the mutant being caught
            raise LookupError(f"{old!r} is in {name}.py {source.count(old)} times: update this mutation")
        mutated = types.ModuleType(module.__name__)
        mutated.__package__ = "posenc_lib"
        exec(compile(source.replace(old, new), f"mutant of {name}.py", "exec"), vars(mutated))
        vars(mutated).update(names)
        return mutated

    settings.load_profile("mutants")
    yield build
    settings.load_profile("course")
