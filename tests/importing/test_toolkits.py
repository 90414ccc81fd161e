"""fairseq, OpenNMT-py and JoeyNMT (docs/guides/toolkits.md): keys and files as the toolkits write them, random weights.

Texts are compared with layers of torch.nn.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.command import ran
from tests.importing.huggingface.published import opened
from tfexport.importing.reference.outputs import record_reference
from tfexport.importing.reference.texts import RecordedTexts
from tfexport.model.model import Model
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession

D, HEADS, FFN, LAYERS, LENGTH, NEW_TOKENS = 16, 2, 24, (3, 2), 64, 12
# As Moses' tokenizer leaves them.
SOURCE = "the house , . &quot; &apos;s &amp; river isn &apos;t @-@ Ärztin 1,000 she says old new".split()
TARGET = "das Haus , . &quot; Fluss nicht @-@ Ärztin 1.000 sie sagt alt neu und".split()


@dataclass(frozen=True)
class Toolkit:
    """How a toolkit names and computes what torch.nn computes too.

    Lists of names are those of the encoder and of the decoder; norms stand in
    the order of their use, projections are those of queries, keys, values and
    the output. `table` gives the positions [length, d_model], `tables` where they
    are stored on each side, and how they are indexed to have the stored shape.
    """

    layers: tuple[str, str]
    attentions: tuple[tuple[str, ...], tuple[str, ...]]
    projections: tuple[str, str, str, str]
    norms: tuple[tuple[str, ...], tuple[str, ...]]
    ffn: tuple[str, str]
    final_norms: tuple[str, str]
    embeddings: tuple[str, str]
    out: str
    norm_first: bool
    eps: float
    has_bias: bool
    special: tuple[str, str, str, str]
    table: Callable[[], Tensor]
    tables: tuple[tuple[str, Any], ...] = ()

    def id_of(self, token: str) -> int:
        return self.special.index(token)


def sinusoid(*, first: int, is_halves: bool) -> Tensor:
    half = D // 2
    rates = [10_000 ** (-i / (half - 1 if is_halves else half)) for i in range(half)]
    rows = []
    for position in range(first, first + LENGTH):
        sines, cosines = ([f(position * rate) for rate in rates] for f in (math.sin, math.cos))
        rows.append([*sines, *cosines] if is_halves else [x for pair in zip(sines, cosines, strict=True) for x in pair])
    return torch.tensor(rows)


FAIRSEQ = Toolkit(
    layers=("encoder.layers.{}.", "decoder.layers.{}."),
    attentions=(("self_attn",), ("self_attn", "encoder_attn")),
    projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    norms=(
        ("self_attn_layer_norm", "final_layer_norm"),
        ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    ),
    ffn=("fc1", "fc2"),
    final_norms=("", ""),
    embeddings=("encoder.embed_tokens", "decoder.embed_tokens"),
    out="decoder.output_projection",
    norm_first=False,
    eps=1e-5,
    has_bias=True,
    special=("<s>", "<pad>", "</s>", "<unk>"),
    # The first token has the position behind the padding's.
    table=lambda: sinusoid(first=2, is_halves=True),
)
OPENNMT = Toolkit(
    layers=("encoder.transformer.{}.", "decoder.transformer_layers.{}."),
    attentions=(("self_attn",), ("self_attn", "context_attn")),
    projections=("linear_query", "linear_keys", "linear_values", "final_linear"),
    norms=(
        ("layer_norm", "feed_forward.layer_norm"),
        ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"),
    ),
    ffn=("feed_forward.w_1", "feed_forward.w_2"),
    final_norms=("encoder.layer_norm", "decoder.layer_norm"),
    embeddings=("encoder.embeddings.make_embedding.emb_luts.0", "decoder.embeddings.make_embedding.emb_luts.0"),
    out="generator",
    norm_first=True,
    eps=1e-6,
    has_bias=False,
    special=("<unk>", "<blank>", "<s>", "</s>"),
    table=lambda: sinusoid(first=0, is_halves=False),
    tables=(("embeddings.make_embedding.pe.pe", (slice(None), None)),),
)
JOEYNMT = Toolkit(
    layers=("encoder.layers.{}.", "decoder.layers.{}."),
    attentions=(("src_src_att",), ("trg_trg_att", "src_trg_att")),
    projections=("q_layer", "k_layer", "v_layer", "output_layer"),
    norms=(("layer_norm", "feed_forward.layer_norm"), ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm")),
    ffn=("feed_forward.pwff_layer.0", "feed_forward.pwff_layer.3"),
    final_norms=("encoder.layer_norm", "decoder.layer_norm"),
    embeddings=("src_embed.lut", "trg_embed.lut"),
    out="decoder.output_layer",
    norm_first=True,
    eps=1e-6,
    has_bias=True,
    special=("<unk>", "<pad>", "<s>", "</s>"),
    table=lambda: sinusoid(first=0, is_halves=False),
    tables=(("pe.pe", (None,)),),
)


class Reference(nn.Module):
    """Layers of torch.nn between embeddings, computed and named as a toolkit does."""

    positions: Tensor

    def __init__(self, toolkit: Toolkit, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        self.toolkit = toolkit
        options = {"dropout": 0.0, "layer_norm_eps": toolkit.eps, "batch_first": True, "norm_first": toolkit.norm_first}
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        self.stacks = nn.ModuleList(
            nn.ModuleList(kind(D, HEADS, FFN, **options) for _ in range(count))  # type: ignore[arg-type]
            for kind, count in zip(kinds, LAYERS, strict=True)
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(D, toolkit.eps) if toolkit.norm_first else nn.Identity() for _ in LAYERS
        )
        self.embeddings = nn.ModuleList(nn.Embedding(size, D) for size in (source_vocab, target_vocab))
        self.out = nn.Linear(D, target_vocab, bias=toolkit is OPENNMT)
        self.register_buffer("positions", toolkit.table(), persistent=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                noise = torch.randn(parameter.shape) * (0.3 if parameter.dim() > 1 else 0.1)
                is_norm, is_bias = "norm" in name, name.endswith("bias")
                parameter.copy_(noise + (1 if is_norm and not is_bias else 0))
                if is_bias and not is_norm and not toolkit.has_bias and not name.startswith("out"):
                    parameter.zero_()

    def embed(self, side: int, ids: Tensor) -> Tensor:
        return self.embeddings[side](ids) * math.sqrt(D) + self.positions[: ids.shape[1]]

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        states, length = self.embed(0, source_ids), target_ids.shape[1]
        for layer in self.stacks[0]:  # type: ignore[union-attr]
            states = layer(states, src_key_padding_mask=~source_mask)
        states, x = self.norms[0](states), self.embed(1, target_ids)
        later = torch.ones(length, length).triu(1).bool()
        for layer in self.stacks[1]:  # type: ignore[union-attr]
            x = layer(x, states, tgt_mask=later, memory_key_padding_mask=~source_mask)
        return self.out(self.norms[1](x))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the weights under the toolkit's names."""
        toolkit, found = self.toolkit, {}
        for side, stack in enumerate(self.stacks):
            if toolkit.norm_first:
                found |= named(toolkit.final_norms[side], self.norms[side])
            found |= named(toolkit.embeddings[side], self.embeddings[side])
            for i, layer in enumerate(stack):  # type: ignore[arg-type]
                prefix = toolkit.layers[side].format(i)
                for name, module in zip(
                    toolkit.attentions[side], [m for m in layer.children() if hasattr(m, "in_proj_weight")], strict=True
                ):
                    found |= attention(f"{prefix}{name}.", module, toolkit)
                norms = [getattr(layer, f"norm{n}") for n in range(1, len(toolkit.norms[side]) + 1)]
                for name, module in zip(toolkit.norms[side], norms, strict=True):
                    found |= named(prefix + name, module)
                for name, module in zip(toolkit.ffn, (layer.linear1, layer.linear2), strict=True):
                    found |= named(prefix + name, module, has_bias=toolkit.has_bias)
        tables = {
            f"{side}.{name}": self.positions[index] for side in ("encoder", "decoder") for name, index in toolkit.tables
        }
        return found | tables | named(toolkit.out, self.out)


def named(prefix: str, module: nn.Module, *, has_bias: bool = True) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": p.detach() for name, p in module.named_parameters() if has_bias or name != "bias"}


def attention(prefix: str, module: Any, toolkit: Toolkit) -> dict[str, Tensor]:
    weights = [*module.in_proj_weight.detach().chunk(3), module.out_proj.weight.detach()]
    biases = [*module.in_proj_bias.detach().chunk(3), module.out_proj.bias.detach()]
    found = {f"{prefix}{name}.weight": w for name, w in zip(toolkit.projections, weights, strict=True)}
    if toolkit.has_bias:
        found |= {f"{prefix}{name}.bias": b for name, b in zip(toolkit.projections, biases, strict=True)}
    return found


class User:
    """Somebody with a model of a toolkit: words in, words out, greedily."""

    def __init__(self, toolkit: Toolkit, start: str, source: Sequence[str], target: Sequence[str]) -> None:
        torch.manual_seed(0)
        self.toolkit, self.source, self.target = toolkit, [*toolkit.special, *source], [*toolkit.special, *target]
        self.start, self.end, self.unk = (toolkit.id_of(token) for token in (start, "</s>", "<unk>"))
        self.suffix: tuple[int, ...] = (self.end,)
        self.model = Reference(toolkit, len(source) + 4, len(target) + 4).eval()
        rng = random.Random(0)
        words = [*SOURCE, "unheard", "<unk>"]
        self.texts = [" ".join(rng.choices(words, k=rng.randint(1, 8))) + " the" for _ in range(40)]
        self.targets = [" ".join(rng.choices(TARGET, k=rng.randint(1, 8))) for _ in range(40)]

    @property
    def banned(self) -> list[int]:
        return [i for i, token in enumerate(self.target) if token != "</s>" and (i < 4 or token.startswith("avery"))]

    def to_ids(self, text: str) -> list[int]:
        ids = {word: i for i, word in enumerate(self.source)}
        return [*(ids.get(word, self.unk) for word in text.split()), *self.suffix]

    def to_text(self, ids: Sequence[int]) -> str:
        return " ".join(self.target[i] for i in ids if i != self.end)

    def answer(self, text: str) -> str:
        source, token_ids = torch.tensor([self.to_ids(text)]), [self.start]
        with torch.no_grad():
            while len(token_ids) <= NEW_TOKENS and (len(token_ids) == 1 or token_ids[-1] != self.end):
                logits = self.model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([token_ids]))[0, -1]
                logits[self.banned] = -torch.inf
                token_ids.append(int(logits.argmax()))
        return self.to_text(token_ids[1:])

    def log_prob(self, text: str, target: str) -> float:
        source = torch.tensor([self.to_ids(text)])
        token_ids = [*(self.target.index(word) for word in target.split()), self.end]
        with torch.no_grad():
            logits = self.model(
                source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[self.start, *token_ids[:-1]]])
            )
        return float(logits[0].log_softmax(-1)[range(len(token_ids)), token_ids].sum())

    def check(self, folder: Path, arguments: Sequence[str]) -> None:
        """Import as the page says, and compare all texts."""
        ran("import", *arguments, "--output", folder / "model")
        options = {"suppress_tokens": self.banned, "max_new_tokens": NEW_TOKENS}
        with Model(EagerSession(load_model(folder / "model")), *opened(folder / "model")) as model:
            found = [result.text for result in model.generate(self.texts, **options)]
            scores = [result.log_prob for result in model.score(self.texts, self.targets)]
        assert found == [self.answer(text) for text in self.texts]
        expected = [self.log_prob(*pair) for pair in zip(self.texts, self.targets, strict=True)]
        assert scores == pytest.approx(expected, abs=1e-4)
        assert len({round(score, 2) for score in expected}) > 30  # the texts tell models apart


def tokens(**ids: int) -> list[str]:
    return [f"--set=tokens.{name}={i}" for name, i in ids.items()]


@pytest.mark.parametrize("is_pre_norm", [False, True])
def test_fairseq(is_pre_norm: bool, tmp_path: Path) -> None:
    more = ["madeupword0000", "madeupword0001"]
    final_norms = ("encoder.layer_norm", "decoder.layer_norm") if is_pre_norm else ("", "")
    toolkit = replace(FAIRSEQ, norm_first=is_pre_norm, final_norms=final_norms)
    user = User(toolkit, "</s>", [*SOURCE, *more], TARGET)
    if not is_pre_norm:  # tied
        user.model.out.weight = user.model.embeddings[1].weight  # type: ignore[assignment]
    state = user.model.state_dict()
    for i in range(LAYERS[0]):  # copies of 0.12, stale in the file
        shapes = {"in_proj": (3 * D, D), "out_proj": (D, D), "fc1": (FFN, D), "fc2": (D, FFN)}
        for name, shape in shapes.items():
            state |= {
                f"encoder.layers.{i}.{name}_{kind}": torch.zeros(s)
                for kind, s in (("weight", shape), ("bias", shape[:1]))
            }
    for side in ("encoder", "decoder"):
        state |= {f"{side}.version": torch.tensor([3.0]), f"{side}.embed_positions._float_tensor": torch.zeros(1)}
    whole = {"args": None, "cfg": {"model": argparse.Namespace(heads=HEADS)}, "model": state, "extra_state": {}}
    torch.save(whole, tmp_path / "checkpoint_best.pt")
    for name, words in (("en", [*SOURCE, *more]), ("de", TARGET)):
        lines = (f"{word} {0 if word in more else 9}\n" for word in words)
        (tmp_path / f"dict.{name}.txt").write_text("".join(lines))
    files = [str(tmp_path / "dict.en.txt"), "--target-tokenizer", str(tmp_path / "dict.de.txt")]
    given = ["--layout", "fairseq_post", "--heads", str(HEADS), *tokens(pad=1, start=2, eos=2, unk=3)]
    given += ["--set=norm_place=pre", "--set=final_norm=true"] if is_pre_norm else []
    user.check(tmp_path, [str(tmp_path / "checkpoint_best.pt"), *given, "--source-suffix", "2", "--tokenizer", *files])


def test_opennmt(tmp_path: Path) -> None:
    padded = [f"averyunlikelytoken{i}" for i in range(3)]  # in the weights, not in the lists
    user = User(OPENNMT, "<s>", [*SOURCE, *padded], [*TARGET, *padded])
    user.suffix = ()
    state = user.model.state_dict()
    generator = {name: state.pop(f"generator.{name}") for name in ("weight", "bias")}
    whole = {"model": state, "generator": generator, "vocab": {"src": user.source}, "opt": argparse.Namespace()}
    torch.save(whole, tmp_path / "model_step_9.pt")
    for name, words in (("src", SOURCE), ("tgt", TARGET)):
        (tmp_path / f"vocab.{name}").write_text("".join(f"{word}\t9\n" for word in words))
    files = [str(tmp_path / "vocab.src"), "--target-tokenizer", str(tmp_path / "vocab.tgt")]
    given = ["--layout", "opennmt_py", "--heads", str(HEADS), *tokens(unk=0, pad=1, start=2, eos=3)]
    user.check(tmp_path, [str(tmp_path / "model_step_9.pt"), *given, "--tokenizer", *files])


def test_joeynmt(tmp_path: Path) -> None:
    user = User(JOEYNMT, "<s>", SOURCE, TARGET)
    saved = {"model_state": user.model.state_dict(), "optimizer_state": {"state": {}}, "scaler_state": None}
    torch.save({**saved, "train_iter_state": torch.ones(9, dtype=torch.uint8)}, tmp_path / "best.ckpt")
    reference, sizes = tmp_path / "joey.golden.safetensors", (len(user.source), len(user.target))
    texts = RecordedTexts(samples=user.texts[:8], to_ids=user.to_ids, to_text=user.to_text, start=2, end=3)
    options = {"source_vocab": sizes[0], "target_vocab": sizes[1], "heads": HEADS, "pad_source": 1, "pad_target": 1}
    record_reference(user.model, Reference.forward, reference, **options, texts=texts)
    for name, words in (("src", user.source), ("trg", user.target)):
        (tmp_path / f"{name}_vocab.txt").write_text("".join(f"{word}\n" for word in words))
    files = [str(tmp_path / "src_vocab.txt"), "--target-tokenizer", str(tmp_path / "trg_vocab.txt")]
    given = ["--reference", str(reference), *tokens(unk=0, pad=1, start=2, eos=3), "--tokenizer", *files]
    user.check(tmp_path, [str(tmp_path / "best.ckpt"), *given])
