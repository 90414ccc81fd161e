"""How a foreign checkpoint is imported."""

from tfexport.config import Config, Heads, Size


class ImportConfig(Config, subject="import"):
    """How a foreign checkpoint becomes a model directory.

    `entry` names the state dict that is meant where a file holds several, such as
    averaged weights. `layout` is auto, the name of a built-in layout or a layout
    file. `heads` is what no shape tells. `settings` are KEY=VALUE, switches and tokens that take
    the place of the layout's. `source_prefix`, `source_suffix` and `target_prefix`
    are ids around what a tokenizer makes of a text; `source_language` and
    `target_language` name those of a multilingual tokenizer. `builtin` lets auto propose the built-in layouts;
    `search_budget` is how many candidates it may run, a mapping of the keys with a value of every switch each;
    `accept_unverified` takes what it proposes without a golden.
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
    # The most that a recorded model is known to need is a quarter of it.
    search_budget: Size = 20_000
    accept_unverified: bool = False

    def _problems(self) -> list[str]:
        problems = []
        if not self.builtin and self.layout != "auto":
            problems.append(f"builtin is false, but layout is {self.layout}; leave one of them out")
        if self.source_language is not None and (self.source_prefix or self.source_suffix):
            problems.append("source_language says what stands around a source; leave source_prefix and suffix out")
        return problems
