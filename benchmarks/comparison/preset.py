"""Write a preset as a model directory, the weights that every system gets: python -m comparison.preset NAME FOLDER."""

from __future__ import annotations

import sys

from tfexport.models.directory import save_model
from tfexport.models.presets import build_preset

if __name__ == "__main__":
    save_model(build_preset(sys.argv[1]), sys.argv[2])
