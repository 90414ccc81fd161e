"""Remove tokens from a tokenizer.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfexport.text.vocabulary import BEYOND

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class TokenizerFile:
    """The vocabulary in a tokenizer.json, whose ids can be renumbered.

    The tokens of any text that kept tokens spell stay the same: the best pieces of a Unigram model are still there, the
    longest ones of WordPiece too, and byte-pair encoding only loses merges that these texts do not use.
    """

    def __init__(self, raw: bytes) -> None:
        self._data: dict[str, Any] = json.loads(raw)
        self._model: dict[str, Any] = self._data["model"]
        self._is_unigram = isinstance(self._model["vocab"], list)
        self.ids: dict[str, int] = (
            {piece: i for i, (piece, _) in enumerate(self._model["vocab"])}
            if self._is_unigram
            else dict(self._model["vocab"])
        )
        self._added = {each["content"]: each["id"] for each in self._data.get("added_tokens", ())}
        self.ids |= self._added
        self._merges = [
            tuple(each.split(" ") if isinstance(each, str) else each) for each in self._model.get("merges", ())
        ]

    def needed(self) -> set[int]:
        """Return the ids of added tokens, and of bytes and characters of subwords.

        Single characters spell all other texts. The least likely piece of a Unigram model sets the score of unknown
        ones.
        """
        found = {*self._added.values(), self.ids.get(self._model.get("unk_token") or "", self._model.get("unk_id"))}
        found.add(self.ids.get(BEYOND))
        if self._is_unigram:
            found.add(min(range(len(self._model["vocab"])), key=lambda i: self._model["vocab"][i][1]))
        if self._is_unigram or self._merges or "continuing_subword_prefix" in self._model:
            found |= {i for token, i in self.ids.items() if len(self._bare(token)) == 1 or _BYTE.fullmatch(token)}
        return {i for i in found if i is not None}

    def with_parts(self, kept: Collection[int]) -> set[int]:
        """Return ids and those of the tokens that they are merged from."""
        parts, tokens = defaultdict[str, set[str]](set), {i: token for token, i in self.ids.items()}
        for left, right in self._merges:
            parts[self._merged(left, right)] |= {left, right}
        found, waiting = set(kept), [tokens[i] for i in kept if i in tokens]
        while waiting:
            added = {self.ids[part] for part in parts[waiting.pop()]} - found
            found |= added
            waiting += [tokens[i] for i in added]
        return found

    def renumbered(self, new: Mapping[int, int]) -> bytes:
        """Return the file with the tokens whose ids are in `new`, under their new ids."""
        model = dict(self._model)
        if self._is_unigram:
            order = sorted((i for i in range(len(model["vocab"])) if i in new), key=new.__getitem__)
            model["vocab"] = [model["vocab"][i] for i in order]
            if model.get("unk_id") is not None:
                model["unk_id"] = new[model["unk_id"]]
        else:
            model["vocab"] = {token: new[i] for token, i in model["vocab"].items() if i in new}
        if self._merges:
            kept = model["vocab"].keys()
            model["merges"] = [[*pair] for pair in self._merges if {*pair, self._merged(*pair)} <= kept]
        data = {**self._data, "model": model, "padding": None, "truncation": None}
        data["added_tokens"] = [{**each, "id": new[each["id"]]} for each in self._data.get("added_tokens", ())]
        data["post_processor"] = _renumbered(data.get("post_processor"), new.__getitem__)
        return json.dumps(data, ensure_ascii=False).encode()

    def _bare(self, token: str) -> str:
        prefix, suffix = (self._model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        return token.removeprefix(prefix).removesuffix(suffix)

    def _merged(self, left: str, right: str) -> str:
        return left + right.removeprefix(self._model.get("continuing_subword_prefix") or "")


def _renumbered(processor: Any, new: Callable[[int], int]) -> Any:
    """Return a post-processor with new ids.

    They are in lists `ids`, and in pairs of a token and an id, `sep` and `cls`.
    """
    if isinstance(processor, list):
        return [_renumbered(each, new) for each in processor]
    if not isinstance(processor, dict):
        return processor
    found = {name: _renumbered(value, new) for name, value in processor.items()}
    if isinstance(found.get("ids"), list):
        found["ids"] = [new(i) for i in processor["ids"]]
    return found | {name: [found[name][0], new(found[name][1])] for name in ("sep", "cls") if name in found}
