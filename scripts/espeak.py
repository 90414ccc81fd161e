"""espeak-ng, which speaks texts and reports when each word starts."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]  # [samples], -1 to 1
# Numbers of the interface of espeak-ng (speak_lib.h).
_SYNCHRONOUS, _RATE, _CHARACTERS, _UTF8, _WORD = 2, 1, 1, 1, 1


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("unique_identifier", "text_position", "length", "audio_position_ms")),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


class Synthesizer:
    """The library of espeak-ng; one in a process."""

    def __init__(self) -> None:
        self._pieces, self._starts = list[Samples](), dict[int, float]()
        self._library = ctypes.CDLL("libespeak-ng.so.1")
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, 0)
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Event))
        self._callback = callback(self._collect)
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, text: str, voice: str, words_per_minute: int) -> tuple[Samples, list[float]]:
        """Return samples, and the seconds at which words start."""
        self._pieces.clear()
        self._starts.clear()
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise click.ClickException(f"espeak-ng has no voice {voice}")
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
        self._library.espeak_Synth(text.encode(), len(text) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
        words = (match.start() + 1 for match in re.finditer(r"\w+", text))
        return np.concatenate(self._pieces), [self._starts[word] for word in words]

    def _collect(self, samples: int | None, count: int, events: Any) -> int:
        if samples and count:
            piece = np.ctypeslib.as_array(ctypes.cast(samples, ctypes.POINTER(ctypes.c_short)), (count,))
            self._pieces.append((piece / 2**15).astype(np.float32))
        while events[0].type:
            if events[0].type == _WORD:  # some are reported twice
                self._starts.setdefault(events[0].text_position, events[0].audio_position_ms / 1000)
            events = ctypes.cast(ctypes.addressof(events[1]), ctypes.POINTER(_Event))
        return 0
