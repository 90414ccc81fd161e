"""Decode: turn a session's candidates into finished token ids."""
