"""Remove unused tokens from a model directory."""

from tfexport.trim._pipeline import Trimmed as Trimmed
from tfexport.trim._pipeline import trim_model as trim_model
