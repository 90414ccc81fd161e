"""The canonical model equals T5 of transformers in float64 throughout, which the import cannot see."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests import tiny
from tests.nn.foreign import canonical
from tests.tiny import VOCAB, Batch
from tfexport.nn.transformer import Transformer

# Both sides in float64; measured 7e-15 of logits up to 6.
TOLERANCE = 1e-9

T5_SIZES = {"d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}


def assert_same(ours: Transformer, theirs: Any, batch: Batch) -> None:
    """Compare encoder states and logits of a Hugging Face model on all valid positions."""
    with torch.no_grad():
        output = theirs(
            input_ids=batch.source_ids, attention_mask=batch.source_mask.long(), decoder_input_ids=batch.target_ids
        )
        hidden = ours.hidden_states(batch.source_ids, batch.source_mask)
        logits = ours(*batch)
    assert logits.dtype == output.logits.dtype == torch.float64
    assert output.logits.std() > 0.1, "logits that are all alike prove nothing"
    assert (hidden - output.encoder_last_hidden_state)[batch.source_mask].abs().max() < TOLERANCE
    assert (logits - output.logits).abs().max() < TOLERANCE


def randomised(theirs: Any) -> Any:
    tiny.randomise(theirs.double())
    return theirs.eval()


def t5(version: Literal["v1.0", "v1.1"], **settings: Any) -> Any:
    settings |= {"vocab_size": VOCAB, "decoder_start_token_id": 0, **T5_SIZES}
    if version == "v1.0":
        return randomised(T5ForConditionalGeneration(T5Config(**settings)))
    config = T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **settings)
    theirs = T5ForConditionalGeneration(config)
    # transformers ties the output of v1.1 too, whose checkpoints have one of their own.
    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    return randomised(theirs)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (18, 128), (10, 160)])
@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_equals_t5_in_float64_throughout(
    version: Literal["v1.0", "v1.1"], buckets: int, max_distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With T5's norm in float64, also at distances beyond the last bucket."""

    def root_mean_square_norm(self: T5LayerNorm, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(T5LayerNorm, "forward", root_mean_square_norm)
    theirs = t5(version, relative_attention_num_buckets=buckets, relative_attention_max_distance=max_distance)
    ours = canonical(theirs)
    assert ours.config.tie_output == (version == "v1.0")
    assert_same(ours, theirs, tiny.batch())
    assert_same(ours, theirs, tiny.batch(source_len=150, target_len=140))
