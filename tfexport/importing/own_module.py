"""Export a user's own PyTorch module, given in Python or by a function name."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tfexport.bundle.manifest import ModuleEntry
from tfexport.bundle.processor import ProcessorConfig
from tfexport.bundle.status import LOOP, MODULE, REFERENCE
from tfexport.contract import ModelSpec
from tfexport.errors import ConfigError, TfexportError, raise_all, raised_by, shortened
from tfexport.generation import GenerationDefaults
from tfexport.importing.preprocessing import Preprocess
from tfexport.importing.reference.texts import RecordedTexts
from tfexport.importing.reference.weights import joint_sum, tensor_sums
from tfexport.importing.text import Tokenizers
from tfexport.nn.eager import EagerModel, Reference, at_once
from tfexport.text.config import TextConfig

_NAME = re.compile(r"(?!preset:)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class OwnModule:
    """A module that no layout can express, with everything that its bundle needs.

    Attributes:
        module: float32 module on the CPU with its weights loaded. It has `encode` and `decode_step`, or `hidden_states`
            if it is encoder-only. It is put into eval mode.
        spec: sizes, limits and token ids; its precision is fp32.
        reference: computes all positions at once, as in training. None calls `module(source_ids, source_mask,
            target_ids)`, or `hidden_states` of an encoder-only module.
        tokenizers: source and target tokenizers, or None if the model works only on ids.
        texts: sample texts and your own code around the model, which the tokenizers are compared with.
        around: ids to add around a text, if the texts do not show them. Its samples are ignored.
        processor: turns audio or images into the features that the module reads; None for token ids, and if callers
            pass features.
        preprocess: your own code that computes the features, to compare the processor with: `preprocess(samples, rate)`
            takes float32 [samples], or `preprocess(image, None)` uint8 [height, width, 3], and returns an array.
        generation: generation defaults of the bundle.
        generate: your own greedy loop, to compare with: `generate(module, source, max_new_tokens)` takes a list of ids,
            or an array of features or pixels, and returns the new ids, with or without start and end.
    """

    module: nn.Module
    spec: ModelSpec
    reference: Reference | None = None
    tokenizers: Tokenizers | None = None
    texts: RecordedTexts | None = None
    around: TextConfig = field(default_factory=TextConfig)
    processor: ProcessorConfig | None = None
    preprocess: Preprocess | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    generate: Callable[[nn.Module, Any, int], Any] | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {shortened(value)}, expected a {kind.__name__}"
            for name, value, kind in (("module", self.module, nn.Module), ("spec", self.spec, ModelSpec))
            if not isinstance(value, kind)
        ]
        raise_all(ConfigError, "own module", problems or self._problems())

    def _problems(self) -> list[str]:
        needed = ("encode", "decode_step") if self.spec.has_decoder else ("hidden_states",)
        problems = [
            f"{type(self.module).__name__} has no method {name}; see docs/guides/your-own-module.md"
            for name in needed
            if not callable(getattr(self.module, name, None))
        ]
        if self.spec.head != "none":
            problems.append(f"spec.head is {self.spec.head}, but a module of your own exports states; expected none")
        if self.spec.precision != "fp32":
            problems.append(f"spec.precision is {self.spec.precision}, expected fp32; --precision is for the graphs")
        others = [name for name, x in self.module.named_parameters() if x.dtype != torch.float32]
        state = (*self.module.named_parameters(), *self.module.named_buffers())
        if others := [*others, *(name for name, x in state if x.device.type != "cpu")]:
            problems.append(f"{others[0][:120]} is not float32 on the CPU; give module.float().cpu()")
        if self.generate is not None and not self.spec.has_decoder:
            problems.append("generate is given, but the spec has no decoder; leave it out")
        if self.preprocess is not None and self.processor is None:
            problems.append("preprocess is given, but no processor to compare with it; give one, or leave it out")
        if self.texts is not None and self.tokenizers is None:
            problems.append("texts are given, but no tokenizers to compare with them; give tokenizers=Tokenizers(PATH)")
        if self.texts is not None and self.spec.has_decoder:
            ids = (("start", self.texts.start, self.spec.tokens.start), ("end", self.texts.end, self.spec.tokens.eos))
            problems += [
                f"{name} of texts is {value}, spec.tokens has {expected}"
                for name, value, expected in ids
                if value not in (None, expected)
            ]
        return [*problems, *self.generation.token_problems(self.spec.vocab)]

    @property
    def model(self) -> EagerModel:
        """Module in eval mode, with its reference and generation loop."""
        author = REFERENCE if self.reference else None  # of an encoder-only module
        if self.spec.has_decoder:
            author = LOOP if self.generate else MODULE
        generate = None if self.generate is None else self._generated
        return EagerModel(self.module.eval(), self.reference or at_once, generate, author)

    @torch.no_grad()
    def _generated(self, source: Any, limit: int) -> tuple[int, ...]:
        """Call `generate`; return ids up to the end token or the limit."""
        assert self.generate is not None
        try:
            ids = torch.as_tensor(self.generate(self.module, source, limit)).flatten().long().tolist()
            if wrong := [token for token in ids if token not in range(self.spec.vocab)]:
                raise ValueError(f"returns {wrong[0]}, expected ids from 0 to {self.spec.vocab - 1}")
        except Exception as error:
            problem = f"{raised_by(error)}, called as generate(module, source of {len(source)}, {limit})"
            raise ConfigError(problem, subject="generate", remedy="return the new ids as a list") from error
        tokens, ids = self.spec.tokens, ids[ids[:1] == [self.spec.tokens.start] :]
        return (*(ids[: ids.index(tokens.eos)] if tokens.eos in ids else ids), tokens.eos)[:limit]

    def entry(self) -> ModuleEntry:
        """Return the manifest entry of the module."""
        kind, sums = type(self.module), tensor_sums(self.module.state_dict())
        return ModuleEntry(name=f"{kind.__module__}.{kind.__qualname__}", weights_sha256=joint_sum(sums, sums))

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that define the module's class."""
        package = type(self.module).__module__.partition(".")[0]
        distributions = importlib.metadata.packages_distributions().get(package, [])
        return {name: importlib.metadata.version(name) for name in sorted(set(distributions))}


def is_own_module(source: str) -> bool:
    """Return whether a source is named PACKAGE.MODULE:FACTORY and is not a file."""
    return bool(_NAME.fullmatch(source)) and not os.path.lexists(source)


def load_own_module(name: str) -> OwnModule:
    """Import PACKAGE.MODULE, first from the working directory, and call its FACTORY()."""
    module, _, factory = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), factory)()
    except TfexportError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: {raised_by(error)}; call it in Python to see the whole traceback") from error
    if not isinstance(found, OwnModule):
        raise ConfigError(f"{name}: returns {shortened(found)}, expected a tfexport.importing.own_module.OwnModule")
    return found
