"""Define the options of a checkpoint import."""

from tfexport.config import Config, Heads, Size


class ImportConfig(Config, subject="import"):
    """Options of a checkpoint import.

    Attributes:
        layout: "auto", the name of a built-in layout, or the path of a layout file.
        entry: name of the state dict to import if the file contains several, such as averaged weights.
        heads: number of attention heads, which shapes do not show.
        settings: KEY=VALUE texts. They replace switches and tokens of the layout.
        source_prefix: ids to add before the tokenized source.
        source_suffix: ids to add after the tokenized source.
        target_prefix: ids to add before the tokenized target.
        source_language: source language of a multilingual tokenizer.
        target_language: target language of a multilingual tokenizer.
        builtin: whether "auto" may choose a built-in layout.
        search_budget: maximum number of candidates to run. A candidate is a mapping of the keys with a value for every
            switch.
        accept_unverified: accept the layout that "auto" proposes without reference outputs.
    """

    layout: str = "auto"
    entry: str | None = None
    heads: Heads | None = None
    settings: tuple[str, ...] = ()
    source_prefix: tuple[int, ...] = ()
    source_suffix: tuple[int, ...] = ()
    target_prefix: tuple[int, ...] = ()
    source_language: str | None = None
    target_language: str | None = None
    builtin: bool = True
    # Four times the most that any recorded model has needed.
    search_budget: Size = 20_000
    accept_unverified: bool = False

    def _problems(self) -> list[str]:
        problems = []
        if not self.builtin and self.layout != "auto":
            problems.append(f"builtin is false, but layout is {self.layout}; leave one of them out")
        if self.source_language is not None and (self.source_prefix or self.source_suffix):
            problems.append("source_language says what stands around a source; leave source_prefix and suffix out")
        return problems
