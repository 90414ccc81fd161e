"""What a model has to do before it is served: run once, and say what was recorded of it."""

from __future__ import annotations

from tfexport.decode.offline import decode
from tfexport.errors import InputError, ParityError
from tfexport.generation import DecodeConfig
from tfexport.model.model import Model
from tfexport.text.compare import check_texts

# Recorded texts that are tried; verify tries all.
NUM_GOLDEN = 8
WARM_UP_TOKENS = 4


def prepare(model: Model, slots: int) -> None:
    """Warm a model up, alone and with all slots, and compare it with its recorded texts.

    Args:
        model: loaded.
        slots: rows that it will decode at once.

    Raises:
        InputError: the model is an encoder alone.
        BackendError: the backend failed, or the model gave numbers that are none.
        ParityError: the tokenizer, or an fp32 model, says something else than was recorded.
    """
    spec = model.spec
    if not spec.has_decoder:
        raise InputError("the bundle is an encoder alone and generates no text; use tfexport embed")
    source = [spec.tokens.eos if spec.tokens.eos < spec.source_vocab else 0]
    room = min(WARM_UP_TOKENS, spec.max_target_length)
    warm_up = DecodeConfig(max_new_tokens=room, min_new_tokens=room)
    for rows in (1, slots):
        decode(model.session, [source] * rows, warm_up, batch_size=rows)
    if model.tokenizer and model.tokenizer.text.samples:
        check_texts(model.tokenizer)
        if model.session.accuracy == "fp32":
            _check_recorded(model)


def _check_recorded(model: Model) -> None:
    assert model.tokenizer
    text = model.tokenizer.text
    samples = [sample for sample in text.samples if sample.target_ids][:NUM_GOLDEN]
    if not samples:
        return
    longest = max(len(sample.target_ids) for sample in samples)
    found = decode(
        model.session,
        [sample.source_ids for sample in samples],
        DecodeConfig(max_new_tokens=min(longest, model.spec.max_target_length - len(text.target_prefix))),
        prefixes=[text.target_prefix] * len(samples),
    )
    for sample, (best,) in zip(samples, found, strict=True):
        said = best.token_ids[: len(sample.target_ids)]
        if said != sample.target_ids:
            raise ParityError(
                f"the recorded text {sample.text!r} came out as {model.tokenizer.decode(said)!r}, expected "
                f"{sample.output!r}; run tfexport verify"
            )
