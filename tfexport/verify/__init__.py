"""Check that every stage agrees with the eager model."""

from tfexport.verify._checks import Stages, VerifyConfig, verify_bundle, verify_stages
from tfexport.verify._report import Decodes, Divergence, Numbers, Report

__all__ = ["Decodes", "Divergence", "Numbers", "Report", "Stages", "VerifyConfig", "verify_bundle", "verify_stages"]
