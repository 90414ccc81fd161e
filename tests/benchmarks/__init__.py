"""Tests of benchmarks/, whose programs import one another as modules of their folder."""

import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
