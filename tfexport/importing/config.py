"""Define the options of a checkpoint import."""

from typing import Annotated

from tfexport.config import Config, Help, Size, TokenId
from tfexport.contract import Labels


class ImportConfig(Config, subject="import"):
    """Options of a checkpoint import."""

    layout: Annotated[str, Help("auto, the name of a built-in layout, or a layout file (YAML).")] = "auto"
    entry: Annotated[str | None, Help("State dict to import from a file with several, such as ema.")] = None
    heads: Annotated[int | None, Help("Attention heads, which shapes do not show.")] = None
    settings: Annotated[tuple[str, ...], Help("Switch or token id of the layout to set, such as norm_eps=1e-6.")] = ()
    ignore: Annotated[tuple[str, ...], Help("Pattern of tensors that the model does not need, such as 'head.*'.")] = ()
    labels: Annotated[Labels, Help("Names of the outputs of the head, in order, such as negative,positive.")] = ()
    source_prefix: Annotated[tuple[TokenId, ...], Help("Ids to add before the tokenized source.")] = ()
    source_suffix: Annotated[tuple[TokenId, ...], Help("Ids to add after it, such as the end token.")] = ()
    target_prefix: Annotated[tuple[TokenId, ...], Help("Ids after the start token that begin every target.")] = ()
    source_language: Annotated[str | None, Help("Language of the sources, as the tokenizer names it.")] = None
    target_language: Annotated[str | None, Help("Language of the outputs, unless a call names another.")] = None
    compare: Annotated[bool, Help("Compare a Hugging Face directory with transformers, if that is installed.")] = True
    tokenize: Annotated[
        str | None, Help("How to split texts: words, chars, basic_english, or a regular expression of tokens.")
    ] = None
    lowercase: Annotated[bool, Help("Put texts into lower case before they are split.")] = False
    builtin: Annotated[bool, Help("Let auto choose a built-in layout.")] = True
    # Four times the most that any recorded model has needed.
    search_budget: Annotated[Size, Help("Most candidates that auto runs, each a mapping and values of switches.")] = (
        20_000
    )
    accept_unverified: Annotated[bool, Help("Accept what auto proposes without reference outputs.")] = False

    def _problems(self) -> list[str]:
        problems = []
        if not self.builtin and self.layout != "auto":
            problems.append(f"builtin is false, but layout is {self.layout}; leave one of them out")
        if self.source_language is not None and (self.source_prefix or self.source_suffix):
            problems.append("source_language sets the ids around a source; leave source_prefix and suffix out")
        return problems
