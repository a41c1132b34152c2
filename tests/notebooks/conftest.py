"""The notebooks' tests share the tools that make the notebooks: one definition of every convention."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
