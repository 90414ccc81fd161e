"""Endpoints of the HTTP app, one file for each protocol."""
