"""Token ids around a text, and recorded texts that a tokenizer must reproduce."""

from collections.abc import Iterator

from tfexport.config import Config

# These limits keep a manifest far below its own limit.
MAX_SAMPLES, MAX_SAMPLE_CHARACTERS = 1000, 2000


class TextSample(Config, subject="sample"):
    """One text with the token ids that the user's own code and model produced."""

    text: str
    source_ids: tuple[int, ...]  # as the model saw them in training
    # Greedy output: target prefix, generated ids and an end token, if any; empty if the model was not run.
    target_ids: tuple[int, ...] = ()
    output: str | None = None  # `target_ids` as text

    def _problems(self) -> Iterator[str]:
        if not self.source_ids:
            yield "source_ids is empty, expected at least one id"
        if min((0, *self.source_ids, *self.target_ids)) < 0:
            yield "ids are negative, expected 0 or more"
        if bool(self.target_ids) != (self.output is not None):
            yield "target_ids and output need each other; give both or neither"
        if len(self.text) + len(self.output or "") > MAX_SAMPLE_CHARACTERS:
            yield f"text and output have more than {MAX_SAMPLE_CHARACTERS} characters; record shorter texts"


class TextConfig(Config, subject="text"):
    """Token ids around a text, and recorded texts."""

    source_prefix: tuple[int, ...] = ()  # before the tokenizer's ids
    source_suffix: tuple[int, ...] = ()  # after them
    target_prefix: tuple[int, ...] = ()  # that every target begins with, after the start token
    samples: tuple[TextSample, ...] = ()  # recorded texts
    end: int | None = None  # id that ends a recorded target

    def _problems(self) -> Iterator[str]:
        for name in ("source_prefix", "source_suffix", "target_prefix"):
            if min((0, *getattr(self, name))) < 0:
                yield f"{name} has negative ids, expected 0 or more"
        if self.end is not None and self.end < 0:
            yield f"end is {self.end}, expected 0 or more"
        if len(self.samples) > MAX_SAMPLES:
            yield f"there are {len(self.samples)} samples, expected at most {MAX_SAMPLES}"

    @property
    def recorded_end(self) -> int | None:
        """The id that ends recorded targets, or None if it is not known.

        Older files only show it if their targets have unequal lengths.
        """
        ends = {sample.target_ids[-1] for sample in self.samples if 0 < len(sample.target_ids) < self._longest}
        return ends.pop() if self.end is None and len(ends) == 1 else self.end

    def is_ended(self, sample: TextSample, eos: int) -> bool:
        """Return whether the target of a sample ended before the limit.

        `eos` is the end if none was recorded.
        """
        end = eos if self.end is None else self.end
        return sample.target_ids[-1:] == (end,) or 0 < len(sample.target_ids) < self._longest

    @property
    def _longest(self) -> int:
        return max((len(sample.target_ids) for sample in self.samples), default=0)

    @property
    def proof(self) -> str:
        """A phrase with the number of compared texts."""
        count = len(self.samples)
        return f"{count} recorded text{'s' if count > 1 else ''}" if count else "its texts were never compared"
