"""One call of the decoder, with its times."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tfexport.bench.samples import Call
from tfexport.bench.timed import TimedSession
from tfexport.decode.offline import decode
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session


class Caller:
    """Decodes batches as `generate` does, and times them; the first token is there when the first step returns."""

    def __init__(self, session: Session, config: DecodeConfig) -> None:
        """Time `session`, decoding as `config` says."""
        self._session, self._config = TimedSession(session), config

    def __call__(self, sources: Sequence[Sequence[int]]) -> Call:
        """Decode some sources together."""
        session = self._session
        session.restart()
        began = time.perf_counter()
        found = decode(session, sources, self._config, batch_size=len(sources))
        return Call(
            began=began,
            first_token=session.first_step_ended,
            ended=time.perf_counter(),
            sequences=len(sources),
            source_tokens=sum(map(len, sources)),
            tokens=sum(len(best[0].token_ids) for best in found),
            encode_s=session.encode_s,
            reorder_s=session.reorder_s,
            step_s=session.step_s,
        )
