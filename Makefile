# Thin wrappers: everything is done by tools/course.py, which also runs without make (Windows: py tools\course.py lab).
#
## make lab         open the lessons in JupyterLab           PORT=8890  NO_BROWSER=1
## make test        unit tests, then every notebook
## make venv        only make .venv, or renew it             CPU=1: torch's CPU wheel, much smaller on Linux
## make bench       timings
## make browser     the lessons in a real browser            needs Chromium
## make notebooks   execute, clean and stamp the lessons     NAMES="03_sinusoidal"
## make figures     draw the pictures in figures/ again
## make publish     stamp the public address everywhere      REPO=owner/name TAG=v1
## make clean       remove .venv and caches, never workbook/

PYTHON ?= python3
COURSE = @command -v $(PYTHON) >/dev/null 2>&1 || { echo "The course needs Python 3.11 or newer, and there is no $(PYTHON) here: install it, or name yours with make $@ PYTHON=..." >&2; exit 1; }; $(PYTHON) tools/course.py

.PHONY: help venv lab test bench browser notebooks figures publish clean

help:
	@sed -n 's/^## //p' Makefile

lab:
	$(COURSE) lab $(if $(PORT),--port $(PORT)) $(if $(NO_BROWSER),--no-browser)

notebooks:
	$(COURSE) notebooks $(NAMES)

# REPO and TAG reach `publish` through the environment
venv test bench browser figures publish clean:
	$(COURSE) $@
