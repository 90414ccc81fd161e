"""One call of the decoder, with its times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tfexport.bench.samples import Call
from tfexport.bench.timed import TimedSession
from tfexport.config import DecodeConfig
from tfexport.decode.batch import decode
from tfexport.decode.stream import stream
from tfexport.runtime.session import Session


class Caller:
    """Decodes batches and times them.

    The first token of a lone greedy text is there when the stream hands it out, that of a batch or of beams when
    the first step returns.
    """

    def __init__(self, session: Session[Any], config: DecodeConfig) -> None:
        """Time `session`, decoding as `config` says."""
        self._session, self._config = TimedSession(session), config

    def __call__(self, sources: Sequence[Sequence[int]]) -> Call:
        """Decode some sources together."""
        timed = self._session
        timed.restart()
        began = time.perf_counter()
        if len(sources) == 1 and self._config.num_beams == 1:
            tokens, first_token = self._stream(sources[0])
        else:
            found = decode(timed, sources, self._config, batch_size=len(sources))
            tokens, first_token = sum(len(best[0].token_ids) for best in found), timed.first_step_ended
        return Call(
            began=began,
            first_token=first_token,
            ended=time.perf_counter(),
            sequences=len(sources),
            source_tokens=sum(map(len, sources)),
            tokens=tokens,
            encode_s=timed.encode_s,
            reorder_s=timed.reorder_s,
            step_s=timed.step_s,
        )

    def _stream(self, source: Sequence[int]) -> tuple[int, float]:
        tokens = stream(self._session, source, self._config)
        next(tokens)
        first_token = time.perf_counter()
        return 1 + sum(1 for _ in tokens), first_token
