"""Recorded texts: text to ids to ids to text, beside what the user's own code and model made of them."""

from __future__ import annotations

from tfexport.decode.offline import decode
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig
from tfexport.runtime.session import Session
from tfexport.text.config import TextSample
from tfexport.text.tokenizer import Tokenizer
from tfexport.verify.divergence import parting
from tfexport.verify.report import Decodes
from tfexport.verify.texts import token_log_probs

METHOD = "recorded texts"
Ids = tuple[int, ...]


def recorded_texts(stage: str, session: Session, tokenizer: Tokenizer, eager: Session, noise: float) -> Decodes:
    """Give the texts that were recorded to a stage, and count those that come out as the user's own code has them.

    Of a text without recorded target ids only the source ids are compared. A text is a tie where ids go in alike and
    part at a token that the eager model, too, holds for as likely as the recorded one, within what the stage's logits
    are wrong by: the original computed in float64.

    Args:
        stage: named in the result.
        session: of the stage.
        tokenizer: with the samples.
        eager: the reference.
        noise: worst error of a logit that was measured for the stage.
    """
    samples = tokenizer.text.samples
    found = [_decoded(session, tokenizer, sample) for sample in samples]
    ties, problems = 0, []
    for number, (sample, ids) in enumerate(zip(samples, found, strict=True)):
        if isinstance(ids, str):
            problems.append(f"text {number}: {ids}")
        elif ids != sample.target_ids:
            if _is_tie(eager, sample, ids, noise):
                ties += 1
            problems.append(_describe(number, sample.target_ids, ids))
        elif ids and (said := tokenizer.decode(ids)) != sample.output:
            problems.append(f"text {number}: {sample.output!r} became {said!r}")
    exact = len(samples) - len(problems)
    first = problems[0] if problems else None
    return Decodes(stage, METHOD, len(samples), exact, ties, first, must_be_exact=session.accuracy == "fp32")


def _decoded(session: Session, tokenizer: Tokenizer, sample: TextSample) -> Ids | str:
    """Decode one text as long as it was recorded; say what is wrong where its ids are not those recorded."""
    try:
        (source,) = tokenizer.encode([sample.text])
    except InputError as error:
        return str(error)
    if tuple(source) != sample.source_ids:
        return f"its ids are {source[:8]}, recorded were {list(sample.source_ids)[:8]}"
    if not sample.target_ids:
        return ()
    prefix = list(tokenizer.text.target_prefix)
    config = DecodeConfig(max_new_tokens=len(sample.target_ids) - len(prefix))
    return decode(session, [source], config, prefixes=[prefix])[0][0].token_ids


def _is_tie(eager: Session, sample: TextSample, ids: Ids, noise: float) -> bool:
    step = parting(sample.target_ids, ids)
    if step >= min(len(sample.target_ids), len(ids)):
        return False
    ours, theirs = (
        token_log_probs(eager, sample.source_ids, tokens[: step + 1])[-1] for tokens in (ids, sample.target_ids)
    )
    return bool(abs(ours - theirs) <= 4 * noise)


def _describe(number: int, wanted: Ids, ids: Ids) -> str:
    step = parting(wanted, ids)
    token = [str(tokens[step]) if step < len(tokens) else "the end" for tokens in (wanted, ids)]
    return f"text {number}, token {step}: {token[0]} became {token[1]}"
