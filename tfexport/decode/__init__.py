"""Decoding: from a session's candidates to finished token ids, the same for every backend."""
