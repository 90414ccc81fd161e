"""Bundles with shortlists, compared with the full model in PyTorch, whose other logits are -inf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tfexport
from tests import tiny
from tests.conftest import Once
from tests.importing.marian_shortlist import allowed, write_shortlist
from tests.runtime.joining import alone, differing, joining, random_requests
from tfexport.bundle.bundle import open_bundle
from tfexport.contract import decoder_graph
from tfexport.decode.offline import decode
from tfexport.decode.score import score
from tfexport.errors import BackendError, BundleError, ConfigError, EngineError, GraphError, InputError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig
from tfexport.nn.config import TransformerConfig
from tfexport.nn.directory import save_model
from tfexport.runtime.eager import load_eager_model
from tfexport.runtime.native._plan import problems as native_problems
from tfexport.runtime.registry import LoadOptions, open_session
from tfexport.runtime.session import MultiStep, ScoresTokens, Session, close_up
from tfexport.runtime.shortlist import Shortlist
from tfexport.runtime.sources import pad_sources
from tfexport.tensorrt.build.resolve import resolve
from tfexport.tensorrt.config import EngineConfig

VOCAB, FIRST, EOS = 200, 5, 2
Logits = Callable[[Sequence[int], Sequence[int]], np.ndarray]
CONFIGS = {
    "post": tiny.config(source_vocab=VOCAB, target_vocab=VOCAB, tie_embeddings=True, tie_output=True),
    "scaled": tiny.config(source_vocab=VOCAB, target_vocab=VOCAB, output_bias=False, logit_scale=0.5),
    "ssru": tiny.config(source_vocab=VOCAB, target_vocab=VOCAB, decoder={"mixer": "ssru"}),
}


@functools.cache
def rows_of() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.choice(VOCAB, rng.integers(0, 9), replace=False).tolist() for _ in range(VOCAB)]


def made(folder: Path, config: TransformerConfig, **options: object) -> Path:
    """Export a random model with shortlists."""
    model = tiny.model(config, dtype=torch.float32)
    save_model(model, folder.with_name(f"{folder.name}-model"))
    table = write_shortlist(folder.with_name(f"{folder.name}.lex"), rows_of(), FIRST)
    settings = ExportConfig(shortlist=table, **options)  # type: ignore[arg-type]
    return export_bundle(str(folder.with_name(f"{folder.name}-model")), folder, settings).path


@pytest.fixture(params=CONFIGS, scope="module")
def bundle(request: pytest.FixtureRequest, once: Once) -> Path:
    name = request.param
    return once(f"shortlist-{name}", lambda path: made(path, CONFIGS[name]))


@pytest.fixture(scope="module")
def post(once: Once) -> Path:
    return once("shortlist-post", lambda path: made(path, CONFIGS["post"]))


def opened(bundle: Path, backend: str = "ort") -> Session:
    return open_session(open_bundle(bundle), LoadOptions(backend=backend, threads=1))


@pytest.fixture(params=["ort", "eager"])
def session(request: pytest.FixtureRequest, bundle: Path) -> Iterator[Session]:
    found = opened(bundle, request.param)
    yield found
    found.close()


def tokens_of(bundle: Path, source: Sequence[int]) -> set[int]:
    is_shared = bundle.name == "shortlist-post"
    return allowed(rows_of(), source, FIRST, VOCAB, is_shared=is_shared) | {EOS}


def logits_of(bundle: Path) -> Logits:
    """Return a function of a source and the tokens read: the logits of the next one in float64, -inf if excluded."""
    model = load_eager_model(open_bundle(bundle)).double()

    @functools.cache
    def excluded(source: tuple[int, ...]) -> list[int]:
        return sorted({*range(VOCAB)} - tokens_of(bundle, source))

    def logits(source: Sequence[int], read: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([source])
        with torch.no_grad():
            found: np.ndarray = model(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([read]))[0, -1].numpy()
        found[excluded(tuple(source))] = -np.inf
        return found

    return logits


def random_sources(count: int, seed: int = 0, longest: int = 9) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def log_probs(logits: np.ndarray) -> np.ndarray:
    finite = logits - logits.max()
    result: np.ndarray = finite - np.log(np.exp(finite).sum())
    return result


def greedy(logits: Logits, source: Sequence[int], start: int, most: int) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < most and found[-1:] != [EOS]:
        found.append(int(logits(source, [start, *found]).argmax()))
    return tuple(found)


def test_steps_return_the_tokens_of_each_shortlist(session: Session, bundle: Path) -> None:
    """Sources join and leave; a row's candidates are those of its own source, whatever its neighbors allow."""
    logits, start = logits_of(bundle), session.spec.tokens.start
    sources = random_sources(6)
    batch, live, read = session.batch(), [0, 1, 2], {number: [start] for number in range(6)}
    batch.add(pad_sources(session.spec.source, sources[:3]), [read[number] for number in live])
    for step, (joins, leaves) in enumerate([([], []), ([3, 4], []), ([], [1, 0]), ([5], []), ([], [0, 2])]):
        if joins:
            for number in joins:
                read[number] += [start] * (number % 3)  # prompts of different lengths
            batch.add(pad_sources(session.spec.source, [sources[j] for j in joins]), [read[j] for j in joins])
            live += joins
        if leaves:
            batch.remove(np.array(leaves))
            live = [live[place] for place in close_up(len(live), np.array(leaves))]
        newest = np.array([read[number][-1] for number in live])
        found = batch.step(newest, (1, 7, VOCAB, 3, VOCAB)[step])
        for row, number in enumerate(live):
            expected = logits(sources[number], read[number])
            ids = found.token_ids[row]
            assert len({*ids.tolist()}) == ids.size
            np.testing.assert_allclose(found.logits[row], np.sort(expected)[::-1][: ids.size], atol=2e-5)
            np.testing.assert_allclose(found.logits[row], expected[ids], atol=2e-5)
            total = np.log(np.exp(expected).sum())
            assert found.log_normalizer[row] == pytest.approx(total, abs=2e-5)
            read[number].append(int(ids[0]))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_texts(bundle: Path, batch_size: int) -> None:
    session, logits, sources = opened(bundle), logits_of(bundle), random_sources(8, seed=1)
    assert isinstance(session.batch(), MultiStep)
    found = decode(session, sources, DecodeConfig(max_new_tokens=7), batch_size=batch_size)
    expected = [greedy(logits, source, session.spec.tokens.start, 7) for source in sources]
    assert [best[0].token_ids for best in found] == expected


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_join_and_leave_are_as_alone(bundle: Path, seed: int) -> None:
    session = opened(bundle)
    requests = random_requests(session, 24, seed)
    expected = alone(opened(bundle, "eager"), requests)
    assert differing(expected, joining(session, requests, seed)) == []
    again = random_requests(session, 24, seed)
    assert differing(expected, joining(session, again, seed, is_ahead=True)) == []


def test_scores_are_normalized_over_the_shortlist(session: Session, bundle: Path) -> None:
    source, start = random_sources(1, seed=5)[0], session.spec.tokens.start
    tokens = tokens_of(bundle, source)
    target = [*sorted(tokens)[-3:], EOS]
    (found,) = score(session, [source], [target])
    for place, token in enumerate(target):
        expected = log_probs(logits_of(bundle)(source, [start, *target[:place]]))[token]
        assert found.log_probs[place] == pytest.approx(expected, abs=4e-5)
    assert isinstance(session.batch(), ScoresTokens)
    excluded = next(token for token in range(VOCAB) if token not in tokens)
    with pytest.raises(InputError) as error:
        score(session, [source, source], [target, [excluded]])
    assert error.value.indices == (1,)


def test_options_that_name_other_tokens(session: Session, bundle: Path) -> None:
    """Forced tokens may be any, a bias cannot bring a token back, and other ends are refused."""
    source = random_sources(1, seed=6)[0]
    excluded = [token for token in range(VOCAB) if token not in tokens_of(bundle, source)]

    def ids(**options: object) -> list[int]:
        config = DecodeConfig(max_new_tokens=6, min_new_tokens=6, **options)  # type: ignore[arg-type]
        return list(decode(session, [source], config)[0][0].token_ids)

    assert ids(forced_bos_token_id=excluded[0])[0] == excluded[0]
    assert not {*ids(sequence_bias=(((excluded[0],), 100.0),))} & {*excluded}
    assert not {*ids(do_sample=True, temperature=50.0)} & {*excluded}
    assert not {*ids(repetition_penalty=9.0, num_beams=3)} & {*excluded}
    assert ids(forced_eos_token_id=(excluded[1],))[-1] == excluded[1]
    with pytest.raises(InputError):
        ids(eos_token_id=(EOS, excluded[0]))
    assert ids(eos_token_id=(EOS, FIRST - 1))


def test_default_ends_are_always_allowed(tmp_path: Path) -> None:
    model = tiny.model(CONFIGS["post"], dtype=torch.float32)
    save_model(model, tmp_path / "model", files={"generation.json": b'{"eos_token_id": [150, 151]}'})
    table = write_shortlist(tmp_path / "lex", [[]] * VOCAB, FIRST)
    export_bundle(str(tmp_path / "model"), tmp_path / "bundle", ExportConfig(shortlist=table), verify=False)
    with tfexport.load(tmp_path / "bundle", threads=1) as loaded:
        batch = loaded.session.batch()
        batch.add(pad_sources(loaded.spec.source, [[100, 101]]), [[1]])
        found = batch.step(np.array([1]), 16)
    assert {*found.token_ids[0][np.isfinite(found.logits[0])].tolist()} == {
        0,
        1,
        2,
        3,
        4,
        100,
        101,
        150,
        151,
        *range(5, 12),
    }


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_bundles(precision: str, once: Once) -> None:
    """The export compares logits and texts with the eager model; all texts have allowed tokens only."""
    config = replace(CONFIGS["post"], d_model=64)
    bundle = once(f"shortlist-{precision}", lambda path: made(path, config, precision=precision))
    session, sources = opened(bundle), random_sources(10, seed=7)
    tokens = [allowed(rows_of(), source, FIRST, VOCAB, is_shared=True) for source in sources]
    for num_beams in (1, 4):
        found = decode(session, sources, DecodeConfig(num_beams=num_beams, max_new_tokens=8))
        assert all({*best[0].token_ids} <= some for best, some in zip(found, tokens, strict=True))


def test_others_refuse_the_bundle(post: Path) -> None:
    bundle = open_bundle(post)
    assert native_problems(bundle)
    with pytest.raises(BundleError):
        open_session(bundle, LoadOptions(backend="ort", variant="static"))
    with pytest.raises((BackendError, BundleError)):
        open_session(bundle, LoadOptions(backend="ort", device="cuda"))
    with pytest.raises(EngineError):
        resolve(bundle, EngineConfig(), None, None)  # type: ignore[arg-type]  # refused before the library is used


@pytest.mark.parametrize(
    "options", [{"precision": "fp16"}, {"precision": "w8a8"}, {"speculation": True}, {"variants": ("concat", "static")}]
)
def test_options_that_exclude_shortlists(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ExportConfig(shortlist=Path("lex.bin"), **options)  # type: ignore[arg-type]


def test_models_without_a_linear_projection_are_refused(tmp_path: Path) -> None:
    config = replace(CONFIGS["post"], logit_softcap=4.0)
    with pytest.raises(GraphError):
        made(tmp_path / "bundle", config)


@pytest.mark.parametrize("numbers", [[], [0] * (VOCAB + 1), [5] * (VOCAB + 2), [0] * (VOCAB + 1) + [1, VOCAB]])
def test_a_damaged_table_is_refused(post: Path, tmp_path: Path, numbers: list[int]) -> None:
    path = tmp_path / "shortlist.bin"
    path.write_bytes(np.array(numbers, "<u4").tobytes())
    with pytest.raises(BundleError):
        Shortlist.read(path, open_bundle(post).manifest.spec)


@pytest.mark.parametrize("part", ["table", "graph", "inputs"])
def test_bundles_with_only_some_parts_of_a_shortlist_are_refused(post: Path, part: str) -> None:
    manifest = open_bundle(post).manifest
    files, graphs = dict(manifest.files), dict(manifest.graphs)
    if part == "table":
        del files["shortlist.bin"]
    elif part == "graph":
        del graphs["shortlist"]
    else:
        graph, plain = graphs["decoder_contrib"], decoder_graph(manifest.spec, "contrib")
        graphs["decoder_contrib"] = replace(graph, inputs=plain.inputs, outputs=plain.outputs)
    with pytest.raises(ConfigError) as error:
        replace(manifest, files=files, graphs=graphs)
    assert len(error.value.problems) == 1
