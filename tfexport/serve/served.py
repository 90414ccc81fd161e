"""A loaded model with the threads that serve it."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from tfexport.errors import ServingError
from tfexport.model.model import Model
from tfexport.serve.alignments import Alignments
from tfexport.serve.worker import Worker


@dataclass(eq=False)
class Served:
    """A model, what decodes it, what aligns it, and whether all that it accepted was answered."""

    model: Model
    worker: Worker
    alignments: Alignments
    is_answered: bool = True

    async def finish(self, reason: ServingError, timeout_s: float | None, hang_s: float) -> bool:
        """Take no more, and wait for all that was accepted.

        Args:
            reason: that others are refused with.
            timeout_s: after which to stop waiting; None for never.
            hang_s: seconds without a sign of life after which to stop waiting.

        Returns:
            Whether all of it is done.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.worker.close(reason)
        wait_s = 0.0
        while not await asyncio.to_thread(self.worker.join, wait_s):
            wait_s = min(end - time.monotonic(), hang_s - self.worker.silent_s)
            if wait_s <= 0:
                return False
        return await self.alignments.join(end, hang_s)

    def abort(self, reason: ServingError) -> None:
        """Give up what is under way: nothing more comes of it."""
        self.is_answered &= self.alignments.is_idle
        self.worker.abort(reason)
        self.alignments.close(reason)
