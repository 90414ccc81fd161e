"""What a user's code does around its model, as data: the ids around a text, and texts that show that it is the same."""

from collections.abc import Iterator

from tfexport.config import Config

# A recorded text is there to be compared, not to train on; both together stay far below the limit of a manifest.
MAX_SAMPLES, MAX_SAMPLE_CHARACTERS = 1000, 2000


class TextSample(Config, subject="sample"):
    """One text and what the user's own code and model made of it.

    Attributes:
        text: that went in.
        source_ids: what the user's code made of it, as the model saw it in training.
        target_ids: what the model said, greedily: the target prefix, what follows, and an end token that came;
            empty where nothing is known of the model's own weights, or for an encoder alone.
        output: what the user's code made of that; None where `target_ids` is empty.
    """

    text: str
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...] = ()
    output: str | None = None

    def _problems(self) -> Iterator[str]:
        if not self.source_ids:
            yield "source_ids is empty, expected at least one id"
        if min((0, *self.source_ids, *self.target_ids)) < 0:
            yield "ids are negative, expected 0 or more"
        if bool(self.target_ids) != (self.output is not None):
            yield "target_ids and output need each other; give both or neither"
        if len(self.text) + len(self.output or "") > MAX_SAMPLE_CHARACTERS:
            yield f"text and output have over {MAX_SAMPLE_CHARACTERS} characters; record shorter texts"


class TextConfig(Config, subject="text"):
    """What surrounds the ids of a text, and texts that were recorded beside the user's own code.

    Attributes:
        source_prefix: ids before what the tokenizer makes of a source.
        source_suffix: ids behind it.
        target_prefix: ids that every target begins with, behind the start token.
        samples: texts that were compared; empty where none ever was.
    """

    source_prefix: tuple[int, ...] = ()
    source_suffix: tuple[int, ...] = ()
    target_prefix: tuple[int, ...] = ()
    samples: tuple[TextSample, ...] = ()

    def _problems(self) -> Iterator[str]:
        for name in ("source_prefix", "source_suffix", "target_prefix"):
            if min((0, *getattr(self, name))) < 0:
                yield f"{name} has negative ids, expected 0 or more"
        if len(self.samples) > MAX_SAMPLES:
            yield f"samples are {len(self.samples)}, expected at most {MAX_SAMPLES}"

    @property
    def proof(self) -> str:
        """Say in words whether texts were compared."""
        count = len(self.samples)
        return f"{count} recorded text{'s' if count > 1 else ''}" if count else "its texts were never compared"
