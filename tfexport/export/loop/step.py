"""The body of the loop graph: one step of the decoder, what it is told, and what is made of its best token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from tfexport.contract import (
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    FLOAT,
    GENERATED_IDS,
    GENERATED_LENGTHS,
    LAST_POSITION,
    LOG_NORMALIZER,
    LOG_PROBS,
    LOGITS,
    LOGITS_TO_KEEP,
    NUM_CANDIDATES,
    POSITIONS,
    TARGET_IDS,
    TOTAL_LENGTH,
    Form,
    LoopSettings,
    ModelSpec,
    key_value_names,
)
from tfexport.export.loop.nodes import Constants, Nodes

STEP = "step"
# Whether a row has ended.
DONE = "done"
_ITERATION, _GOES_ON = f"{STEP}/iteration", f"{STEP}/goes_on"


def carried(spec: ModelSpec) -> dict[str, int]:
    """Name what goes from step to step, with its type.

    All but the caches are [batch, n]: `target_ids` of the prompt and then of one token, `generated_ids` of all so far.
    """
    cache = TensorProto.DataType.Value({"float32": "float"}.get(FLOAT[spec.precision], FLOAT[spec.precision]).upper())
    return {
        TARGET_IDS: TensorProto.INT64,
        DONE: TensorProto.BOOL,
        GENERATED_IDS: TensorProto.INT64,
        GENERATED_LENGTHS: TensorProto.INT64,
        LOG_PROBS: TensorProto.FLOAT,
        **dict.fromkeys(key_value_names("past", spec.layers), cache),
    }


class LoopStep:
    """Writes the body.

    It reads names of the graph around it: those of the constants, the encoder's outputs, the number of rows and that of
    the last step.
    """

    def __init__(
        self,
        decoder: onnx.GraphProto,
        form: Form,
        spec: ModelSpec,
        settings: LoopSettings,
        *,
        constants: Constants,
        rows: str,
        last: str,
        bans: Mapping[str, str],
    ) -> None:
        """Take what is there already.

        Args:
            decoder: its names begin with "decoder/", but for what it reads of the source.
            form: of the decoder.
            spec: of the model.
            settings: what is generated.
            constants: of the graph around the body.
            rows: name of the number of sources, int64 [1].
            last: name of the number of the last step, int64 [].
            bans: names of what is added to the logits, float32 [vocab]: "always", and "early" before the least length.
        """
        self._decoder, self._form, self._spec, self._settings = decoder, form, spec, settings
        self._constants, self._rows, self._last, self._bans = constants, rows, last, bans
        self._nodes = Nodes(STEP)

    def graph(self) -> onnx.GraphProto:
        """Write the body: what `carried` names goes in and comes out."""
        kinds = carried(self._spec)
        given = {name: f"{STEP}/{name}" for name in kinds}
        self._run_decoder(given)
        results = self._take(given)
        scalars = {_ITERATION: TensorProto.INT64, _GOES_ON: TensorProto.BOOL}
        inputs = [helper.make_tensor_value_info(name, kind, []) for name, kind in scalars.items()]
        outputs = [helper.make_tensor_value_info(self._goes_on(results[DONE]), TensorProto.BOOL, [])]
        for names, values in ((given, inputs), (results, outputs)):
            # Without a shape: lengths grow from step to step.
            values += [helper.make_tensor_value_info(names[name], kind, None) for name, kind in kinds.items()]
        return helper.make_graph(self._nodes, STEP, inputs, outputs)

    def _run_decoder(self, given: Mapping[str, str]) -> None:
        """Give the decoder its inputs under its own names for them."""
        one = self._constants([1])
        fed = {TARGET_IDS: given[TARGET_IDS], NUM_CANDIDATES: one, LOGITS_TO_KEEP: one}
        fed |= {name: given[name] for name in key_value_names("past", self._spec.layers)}
        fed |= {name: f"encoder/{name}" for name in key_value_names("cross", self._spec.layers)}
        if self._form == "contrib":
            fed |= self._positions(given[TARGET_IDS])
        theirs = {f"decoder/{name}": ours for name, ours in fed.items()}
        for node in self._decoder.node:
            node.input[:] = [theirs.get(name, name) for name in node.input]
        self._nodes += self._decoder.node

    def _positions(self, target_ids: str) -> dict[str, str]:
        """Say where the new tokens stand: the prompt at the beginning, then one behind the other."""
        nodes, constants, prompt = self._nodes, self._constants, len(self._settings.prompt)
        count = nodes("Shape", target_ids, start=1, end=2)
        # The prompt is read in the first step; later ones stand so much further.
        total = nodes("Add", nodes("Reshape", _ITERATION, constants([1])), constants([prompt]))
        begin, newest = nodes("Sub", total, count), nodes("Sub", total, constants([1]))
        places = constants(np.arange(prompt))
        if prompt > 1:
            places = nodes("Slice", places, constants([0]), count)
        positions = nodes("Unsqueeze", nodes("Add", begin, places), constants([0]))
        shape = nodes("Concat", self._rows, constants([1]), axis=0)
        newest = nodes("Expand", nodes("Cast", newest, to=TensorProto.INT32), self._rows)
        return {
            POSITIONS: nodes("Expand", positions, shape),
            LAST_POSITION: newest,
            TOTAL_LENGTH: nodes("Cast", total, to=TensorProto.INT32),
        }

    def _take(self, given: Mapping[str, str]) -> dict[str, str]:
        """Lengthen each row that has not ended by its best token, the others by padding."""
        nodes, constants, done = self._nodes, self._constants, given[DONE]
        token, log_prob = self._forced(*self._best())
        token = nodes("Where", done, constants(self._spec.tokens.pad), token)
        log_prob = nodes("Where", done, constants(0, np.float32), log_prob)
        is_new = nodes("Where", done, constants(0), constants(1))
        return {
            TARGET_IDS: token,
            DONE: nodes("Or", done, self._is_end(token)),
            GENERATED_IDS: nodes("Concat", given[GENERATED_IDS], token, axis=1),
            GENERATED_LENGTHS: nodes("Add", given[GENERATED_LENGTHS], is_new),
            LOG_PROBS: nodes("Add", given[LOG_PROBS], log_prob),
            **{
                name: f"decoder/{name.replace('past', 'present')}"
                for name in key_value_names("past", self._spec.layers)
            },
        }

    def _best(self) -> tuple[str, str]:
        """Return the best token that is not banned and its log-probability, both [batch, 1]."""
        nodes = self._nodes
        token, logit = f"decoder/{CANDIDATE_IDS}", f"decoder/{CANDIDATE_LOGITS}"
        if self._bans:
            ban = self._bans["always"]
            if "early" in self._bans:
                is_early = nodes("Less", _ITERATION, self._constants(self._settings.min_new_tokens))
                ban = nodes("Where", is_early, self._bans["early"], ban)
            logits = nodes("Add", f"decoder/{LOGITS}", ban)
            token = nodes("ArgMax", logits, axis=1, keepdims=1)  # the first of equal ones
            logit = nodes("GatherElements", logits, token, axis=1)
        return token, nodes("Sub", logit, f"decoder/{LOG_NORMALIZER}")

    def _forced(self, token: str, log_prob: str) -> tuple[str, str]:
        """Put the forced tokens in their places, the last one before the first where they meet."""
        nodes, constants, settings = self._nodes, self._constants, self._settings
        for forced, place in ((settings.forced_first, constants(0)), (settings.forced_last, self._last)):
            if forced is not None:
                is_there = nodes("Equal", _ITERATION, place)
                token = nodes("Where", is_there, constants(forced), token)
                log_prob = nodes("Where", is_there, constants(0, np.float32), log_prob)
        return token, log_prob

    def _is_end(self, token: str) -> str:
        """Say which rows have said an end, bool [batch, 1]."""
        nodes, ends = self._nodes, self._settings.ends
        found = nodes("Equal", token, self._constants([ends]))
        if len(ends) == 1:
            return found
        counted = nodes("Cast", found, to=TensorProto.INT32)
        return nodes("Cast", nodes("ReduceMax", counted, self._constants([1]), keepdims=1), to=TensorProto.BOOL)

    def _goes_on(self, done: str) -> str:
        nodes = self._nodes
        least = nodes("ReduceMin", nodes("Cast", done, to=TensorProto.INT32), keepdims=0)
        return nodes("Not", nodes("Cast", least, to=TensorProto.BOOL))
