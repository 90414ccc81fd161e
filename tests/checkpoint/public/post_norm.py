"""Public models with norms behind the sublayers, rebuilt: their keys, shapes and maths, not their code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checkpoint.public.parts import (
    HEADS,
    LAYERS,
    LENGTH,
    SOURCE,
    TARGET,
    D,
    Tree,
    attend,
    causal,
    layers,
    std_norm,
    waves,
)


class Jadore801120(nn.Module):
    """Embeddings are normed, attentions have no biases; one table for all, and logits scaled for it."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            maps = {name: nn.Linear(D, D, bias=False) for name in ("w_qs", "w_ks", "w_vs", "fc")}
            return Tree(**maps, layer_norm=nn.LayerNorm(D, eps=1e-6))

        def network() -> Tree:
            return Tree(w_1=nn.Linear(D, 24), w_2=nn.Linear(24, D), layer_norm=nn.LayerNorm(D, eps=1e-6))

        def side(**parts: object) -> Tree:
            table = Tree(pos_table=waves()[None])
            return Tree(**parts, position_enc=table, layer_norm=nn.LayerNorm(D, eps=1e-6))

        shared = nn.Embedding(TARGET, D)
        self.encoder = side(
            src_word_emb=shared, layer_stack=layers(lambda: Tree(slf_attn=attention(), pos_ffn=network()))
        )
        self.decoder = side(
            trg_word_emb=shared,
            layer_stack=layers(lambda: Tree(slf_attn=attention(), enc_attn=attention(), pos_ffn=network())),
        )
        self.trg_word_prj = nn.Linear(D, TARGET, bias=False)
        self.trg_word_prj.weight = shared.weight

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            y = part.fc(attend(part.w_qs(x), part.w_ks(memory), part.w_vs(memory), seen))
            return part.layer_norm(x + y)

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer_norm(x + part.w_2(part.w_1(x).relu()))

        def embed(side: Tree, table: nn.Module, ids: Tensor) -> Tensor:
            return side.layer_norm(table(ids) + side.position_enc.pos_table[:, : ids.shape[1]])

        memory = embed(self.encoder, self.encoder.src_word_emb, source)
        for layer in self.encoder.layer_stack:
            memory = think(layer.pos_ffn, mix(layer.slf_attn, memory, memory, keep[:, None]))
        x = embed(self.decoder, self.decoder.trg_word_emb, target)
        for layer in self.decoder.layer_stack:
            x = mix(layer.slf_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.enc_attn, x, memory, keep[:, None]))
        return self.trg_word_prj(x) * D**-0.5


class AladdinPersson(nn.Module):
    """One small projection for all heads, scores divided by the root of the whole width, learned positions."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            small = {name: nn.Linear(D // HEADS, D // HEADS, bias=False) for name in ("values", "keys", "queries")}
            return Tree(**small, fc_out=nn.Linear(D, D))

        def block() -> Tree:
            network = nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D))
            return Tree(attention=attention(), norm1=nn.LayerNorm(D), norm2=nn.LayerNorm(D), feed_forward=network)

        def side(vocab: int) -> Tree:
            return Tree(word_embedding=nn.Embedding(vocab, D), position_embedding=nn.Embedding(LENGTH, D))

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.layers = layers(block)
        self.decoder.layers = layers(
            lambda: Tree(norm=nn.LayerNorm(D), attention=attention(), transformer_block=block())
        )
        self.decoder.fc_out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            q, k, v = (
                project(y.unflatten(-1, (HEADS, -1))).flatten(2)
                for project, y in ((part.queries, x), (part.keys, memory), (part.values, memory))
            )
            return part.fc_out(attend(q, k, v, seen, scale=D**-0.5))

        def block(part: Tree, x: Tensor, memory: Tensor) -> Tensor:
            x = part.norm1(x + mix(part.attention, x, memory, keep[:, None]))
            return part.norm2(x + part.feed_forward(x))

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.word_embedding(ids) + side.position_embedding.weight[: ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.layers:
            memory = block(layer, memory, memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.layers:
            x = layer.norm(x + mix(layer.attention, x, x, causal(target)))
            x = block(layer.transformer_block, x, memory)
        return self.decoder.fc_out(x)


class Dreamgonfly(nn.Module):
    """Its own norm; a misspelt embedding whose weight has a second name, and a third where it is the output's."""

    def __init__(self) -> None:
        super().__init__()

        def sublayer(inner: Tree) -> Tree:
            norm = Tree(gain=nn.Parameter(torch.ones(D)), bias=nn.Parameter(torch.zeros(D)))
            return Tree(sublayer=inner, layer_normalization=norm)

        def attention() -> Tree:
            names = ("query_projection", "key_projection", "value_projection", "final_projection")
            return sublayer(Tree(**{name: nn.Linear(D, D) for name in names}))

        def network() -> Tree:
            maps = nn.Linear(D, 24), nn.Dropout(), nn.ReLU(), nn.Linear(24, D)
            return sublayer(Tree(feed_forward=nn.Sequential(*maps)))

        def embedding(vocab: int) -> Tree:
            table = nn.Embedding(vocab, D)
            return Tree(weight=table.weight, pe=waves()[None], embbedding=table)

        self.encoder = Tree(
            embedding=embedding(SOURCE),
            encoder_layers=layers(
                lambda: Tree(self_attention_layer=attention(), pointwise_feedforward_layer=network())
            ),
        )
        self.decoder = Tree(
            embedding=embedding(TARGET),
            decoder_layers=layers(
                lambda: Tree(
                    self_attention_layer=attention(),
                    memory_attention_layer=attention(),
                    pointwise_feedforward_layer=network(),
                )
            ),
            generator=nn.Linear(D, TARGET),
        )
        self.decoder.generator.weight = self.decoder.embedding.weight

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.layer_normalization.gain, part.layer_normalization.bias, 1e-6)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            maps = part.sublayer
            q, k, v = maps.query_projection(x), maps.key_projection(memory), maps.value_projection(memory)
            return normed(part, x + maps.final_projection(attend(q, k, v, seen)))

        def think(part: Tree, x: Tensor) -> Tensor:
            return normed(part, x + part.sublayer.feed_forward(x))

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding.embbedding(ids) * D**0.5 + side.embedding.pe[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.encoder_layers:
            memory = mix(layer.self_attention_layer, memory, memory, keep[:, None])
            memory = think(layer.pointwise_feedforward_layer, memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.decoder_layers:
            x = mix(layer.self_attention_layer, x, x, causal(target))
            x = mix(layer.memory_attention_layer, x, memory, keep[:, None])
            x = think(layer.pointwise_feedforward_layer, x)
        return self.decoder.generator(x)


class Wmathor(nn.Module):
    """Norms are made anew in every call, so that none has a parameter; no bias anywhere."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D, bias=False) for name in ("W_Q", "W_K", "W_V", "fc")})

        def network() -> Tree:
            maps = nn.Linear(D, 24, bias=False), nn.ReLU(), nn.Linear(24, D, bias=False)
            return Tree(fc=nn.Sequential(*maps))

        self.encoder = Tree(
            src_emb=nn.Embedding(SOURCE, D),
            pos_emb=Tree(pe=waves()[:, None]),
            layers=layers(lambda: Tree(enc_self_attn=attention(), pos_ffn=network())),
        )
        self.decoder = Tree(
            tgt_emb=nn.Embedding(TARGET, D),
            pos_emb=Tree(pe=waves()[:, None]),
            layers=layers(lambda: Tree(dec_self_attn=attention(), dec_enc_attn=attention(), pos_ffn=network())),
        )
        self.projection = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            y = part.fc(attend(part.W_Q(x), part.W_K(memory), part.W_V(memory), seen))
            return F.layer_norm(x + y, (D,))

        def think(part: Tree, x: Tensor) -> Tensor:
            return F.layer_norm(x + part.fc(x), (D,))

        memory = self.encoder.src_emb(source) + self.encoder.pos_emb.pe[: source.shape[1], 0]
        for layer in self.encoder.layers:
            memory = think(layer.pos_ffn, mix(layer.enc_self_attn, memory, memory, keep[:, None]))
        x = self.decoder.tgt_emb(target) + self.decoder.pos_emb.pe[: target.shape[1], 0]
        for layer in self.decoder.layers:
            x = mix(layer.dec_self_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.dec_enc_attn, x, memory, keep[:, None]))
        return self.projection(x)


class Graykode(nn.Module):
    """Convolutions of width 1; its positions are written out: 1, 2, 3, 4, 0 of a source, 5, 1, 2, 3, 4 of a target."""

    source_len = target_len = 5

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            maps = {name: nn.Linear(D, D) for name in ("W_Q", "W_K", "W_V", "linear")}
            return Tree(**maps, layer_norm=nn.LayerNorm(D))

        def network() -> Tree:
            return Tree(conv1=nn.Conv1d(D, 24, 1), conv2=nn.Conv1d(24, D, 1), layer_norm=nn.LayerNorm(D))

        def positions() -> nn.Embedding:
            return nn.Embedding.from_pretrained(waves(6), freeze=True)

        self.encoder = Tree(
            src_emb=nn.Embedding(SOURCE, D),
            pos_emb=positions(),
            layers=layers(lambda: Tree(enc_self_attn=attention(), pos_ffn=network())),
        )
        self.decoder = Tree(
            tgt_emb=nn.Embedding(TARGET, D),
            pos_emb=positions(),
            layers=layers(lambda: Tree(dec_self_attn=attention(), dec_enc_attn=attention(), pos_ffn=network())),
        )
        self.projection = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            y = part.linear(attend(part.W_Q(x), part.W_K(memory), part.W_V(memory), seen))
            return part.layer_norm(y + x)

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer_norm(part.conv2(part.conv1(x.mT).relu()).mT + x)

        places = torch.tensor([[1, 2, 3, 4, 0], [5, 1, 2, 3, 4]])
        memory = self.encoder.src_emb(source) + self.encoder.pos_emb(places[0, : source.shape[1]])
        for layer in self.encoder.layers:
            memory = think(layer.pos_ffn, mix(layer.enc_self_attn, memory, memory, keep[:, None]))
        x = self.decoder.tgt_emb(target) + self.decoder.pos_emb(places[1, : target.shape[1]])
        for layer in self.decoder.layers:
            x = mix(layer.dec_self_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.dec_enc_attn, x, memory, keep[:, None]))
        return self.projection(x)


class JayParks(nn.Module):
    """Its own norm, linear maps inside modules of its own, positions from 1: row 0 of the table is the padding's."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.ones(D)), beta=nn.Parameter(torch.zeros(D)))

        def attention() -> Tree:
            heads = Tree(**{name: Tree(linear=nn.Linear(D, D)) for name in ("w_q", "w_k", "w_v")})
            return Tree(multihead_attn=heads, proj=Tree(linear=nn.Linear(D, D)), layer_norm=norm())

        def network() -> Tree:
            return Tree(conv1=nn.Conv1d(D, 24, 1), conv2=nn.Conv1d(24, D, 1), layer_norm=norm())

        def positions() -> Tree:
            table = torch.cat((torch.zeros(1, D), waves()))
            return Tree(pos_enc=nn.Embedding.from_pretrained(table, freeze=True))

        self.encoder = Tree(
            src_emb=nn.Embedding(SOURCE, D),
            pos_emb=positions(),
            layers=layers(lambda: Tree(enc_self_attn=attention(), pos_ffn=network())),
        )
        self.decoder = Tree(
            tgt_emb=nn.Embedding(TARGET, D),
            pos_emb=positions(),
            layers=layers(lambda: Tree(dec_self_attn=attention(), dec_enc_attn=attention(), pos_ffn=network())),
        )
        self.tgt_proj = Tree(linear=nn.Linear(D, TARGET, bias=False))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.layer_norm.gamma, part.layer_norm.beta, 1e-6)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            maps = part.multihead_attn
            y = attend(maps.w_q.linear(x), maps.w_k.linear(memory), maps.w_v.linear(memory), seen)
            return normed(part, x + part.proj.linear(y))

        def think(part: Tree, x: Tensor) -> Tensor:
            return normed(part, x + part.conv2(part.conv1(x.mT).relu()).mT)

        def places(ids: Tensor, seen: Tensor) -> Tensor:
            return torch.where(seen, torch.arange(1, ids.shape[1] + 1), 0)

        is_target = torch.ones_like(target, dtype=torch.bool)
        memory = self.encoder.src_emb(source) + self.encoder.pos_emb.pos_enc(places(source, keep))
        for layer in self.encoder.layers:
            memory = think(layer.pos_ffn, mix(layer.enc_self_attn, memory, memory, keep[:, None]))
        x = self.decoder.tgt_emb(target) + self.decoder.pos_emb.pos_enc(places(target, is_target))
        for layer in self.decoder.layers:
            x = mix(layer.dec_self_attn, x, x, causal(target))
            x = think(layer.pos_ffn, mix(layer.dec_enc_attn, x, memory, keep[:, None]))
        return self.tgt_proj.linear(x)


class FeatherAi(nn.Module):
    """Each head has linear maps of its own, in three lists."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            lists = {
                name: layers(lambda: nn.Linear(D, D // HEADS), HEADS)
                for name in ("linear_Qs", "linear_Ks", "linear_Vs")
            }
            return Tree(**lists, mha_linear=nn.Linear(D, D))

        def norms(count: int) -> dict[str, Tree]:
            return {f"norm_{i}": Tree(layer_norm=nn.LayerNorm(D)) for i in range(1, count + 1)}

        def network() -> Tree:
            return Tree(ff=nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, D)))

        def side(vocab: int) -> Tree:
            return Tree(embedding=Tree(embed=nn.Embedding(vocab, D)), PE=Tree(pe=waves()[None]))

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.encoders = layers(lambda: Tree(**norms(2), mha=attention(), ff=network()))
        self.decoder.decoders = layers(
            lambda: Tree(**norms(3), masked_mha=attention(), enc_dec_mha=attention(), ff=network())
        )
        self.linear_layer = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            every = zip(part.linear_Qs, part.linear_Ks, part.linear_Vs, strict=True)
            heads = [attend(q(x), k(memory), v(memory), seen, heads=1) for q, k, v in every]
            return part.mha_linear(torch.cat(heads, -1))

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding.embed(ids) * D**0.5 + side.PE.pe[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.encoders:
            memory = layer.norm_1.layer_norm(mix(layer.mha, memory, memory, keep[:, None]) + memory)
            memory = layer.norm_2.layer_norm(layer.ff.ff(memory) + memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.decoders:
            x = layer.norm_1.layer_norm(mix(layer.masked_mha, x, x, causal(target)) + x)
            x = layer.norm_2.layer_norm(mix(layer.enc_dec_mha, x, memory, keep[:, None]) + x)
            x = layer.norm_3.layer_norm(layer.ff.ff(x) + x)
        return self.linear_layer(x)


class Ajhalthor(nn.Module):
    """Projections fused within each head: queries, keys and values; across, keys and values."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.ones(D)), beta=nn.Parameter(torch.zeros(D)))

        def attention() -> Tree:
            return Tree(qkv_layer=nn.Linear(D, 3 * D), linear_layer=nn.Linear(D, D))

        def across() -> Tree:
            return Tree(kv_layer=nn.Linear(D, 2 * D), q_layer=nn.Linear(D, D), linear_layer=nn.Linear(D, D))

        def network() -> Tree:
            return Tree(linear1=nn.Linear(D, 24), linear2=nn.Linear(24, D))

        def side(vocab: int) -> Tree:
            return Tree(sentence_embedding=Tree(embedding=nn.Embedding(vocab, D)))

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.layers = layers(lambda: Tree(attention=attention(), norm1=norm(), ffn=network(), norm2=norm()))
        self.decoder.layers = layers(
            lambda: Tree(
                self_attention=attention(),
                layer_norm1=norm(),
                encoder_decoder_attention=across(),
                layer_norm2=norm(),
                ffn=network(),
                layer_norm3=norm(),
            )
        )
        self.linear = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,), part.gamma, part.beta, 1e-5)

        def by_head(fused: Tensor, parts: int) -> list[Tensor]:
            return [part.flatten(2) for part in fused.unflatten(-1, (HEADS, -1)).chunk(parts, -1)]

        def mix(part: Tree, x: Tensor, seen: Tensor) -> Tensor:
            q, k, v = by_head(part.qkv_layer(x), 3)
            return part.linear_layer(attend(q, k, v, seen))

        def look(part: Tree, x: Tensor, memory: Tensor) -> Tensor:
            k, v = by_head(part.kv_layer(memory), 2)
            return part.linear_layer(attend(part.q_layer(x), k, v, keep[:, None]))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.linear2(part.linear1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            angle = torch.arange(ids.shape[1])[:, None] / torch.pow(10000, torch.arange(0, D, 2).float() / D)
            return side.sentence_embedding.embedding(ids) + torch.stack((angle.sin(), angle.cos()), 2).flatten(1)

        memory = embed(self.encoder, source)
        for layer in self.encoder.layers:
            memory = normed(layer.norm1, mix(layer.attention, memory, keep[:, None]) + memory)
            memory = normed(layer.norm2, think(layer.ffn, memory) + memory)
        x = embed(self.decoder, target)
        for layer in self.decoder.layers:
            x = normed(layer.layer_norm1, mix(layer.self_attention, x, causal(target)) + x)
            x = normed(layer.layer_norm2, look(layer.encoder_decoder_attention, x, memory) + x)
            x = normed(layer.layer_norm3, think(layer.ffn, x) + x)
        return self.linear(x)


class D2l(nn.Module):
    """Layers are named block0, block1; attentions without biases; a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D, bias=False) for name in ("W_q", "W_k", "W_v", "W_o")})

        def norms(count: int) -> dict[str, Tree]:
            return {f"addnorm{i}": Tree(ln=nn.LayerNorm(D)) for i in range(1, count + 1)}

        def network() -> Tree:
            return Tree(dense1=nn.Linear(D, 24), dense2=nn.Linear(24, D))

        def encoder_block() -> Tree:
            return Tree(attention=attention(), **norms(2), ffn=network())

        def decoder_block() -> Tree:
            return Tree(attention1=attention(), attention2=attention(), **norms(3), ffn=network())

        self.encoder = Tree(embedding=nn.Embedding(SOURCE, D), pos_encoding=Tree())
        self.encoder.blks = Tree(**{f"block{i}": encoder_block() for i in range(LAYERS)})
        self.decoder = Tree(embedding=nn.Embedding(TARGET, D), pos_encoding=Tree())
        self.decoder.blks = Tree(**{f"block{i}": decoder_block() for i in range(LAYERS)})
        self.decoder.dense = nn.Linear(D, TARGET)
        for side in (self.encoder, self.decoder):
            side.pos_encoding.P = waves()[None]

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.W_o(attend(part.W_q(x), part.W_k(memory), part.W_v(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.dense2(part.dense1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding(ids) * D**0.5 + side.pos_encoding.P[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for block in self.encoder.blks.children():
            memory = block.addnorm1.ln(mix(block.attention, memory, memory, keep[:, None]) + memory)
            memory = block.addnorm2.ln(think(block.ffn, memory) + memory)
        x = embed(self.decoder, target)
        for block in self.decoder.blks.children():
            x = block.addnorm1.ln(mix(block.attention1, x, x, causal(target)) + x)
            x = block.addnorm2.ln(mix(block.attention2, x, memory, keep[:, None]) + x)
            x = block.addnorm3.ln(think(block.ffn, x) + x)
        return self.decoder.dense(x)


class Leviswind(nn.Module):
    """As Kyubyong's: queries, keys and values behind a ReLU, no output projection, layers that are numbered names."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.ones(D)), beta=nn.Parameter(torch.zeros(D)))

        def attention() -> Tree:
            maps = {f"{name}_proj": nn.Sequential(nn.Linear(D, D), nn.ReLU()) for name in "QKV"}
            return Tree(**maps, normalization=norm())

        def network() -> Tree:
            wide = nn.Sequential(nn.Linear(D, 24), nn.ReLU())
            return Tree(conv1=wide, conv2=nn.Linear(24, D), normalization=norm())

        def table(rows: int) -> Tree:
            return Tree(lookup_table=nn.Parameter(torch.randn(rows, D)))

        self.enc_emb, self.enc_positional_encoding = table(SOURCE), table(LENGTH)
        for i in range(LAYERS):
            setattr(self, f"enc_self_attention_{i}", attention())
            setattr(self, f"enc_feed_forward_{i}", network())
        self.dec_emb, self.dec_positional_encoding = table(TARGET), table(LENGTH)
        for i in range(LAYERS):
            setattr(self, f"dec_self_attention_{i}", attention())
            setattr(self, f"dec_vanilla_attention_{i}", attention())
            setattr(self, f"dec_feed_forward_{i}", network())
        self.logits_layer = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.normalization.gamma, part.normalization.beta, 1e-8)

        def mix(part: Any, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return normed(part, x + attend(part.Q_proj(x), part.K_proj(memory), part.V_proj(memory), seen))

        def think(part: Any, x: Tensor) -> Tensor:
            return normed(part, x + part.conv2(part.conv1(x)))

        def embed(table: Tree, positions: Tree, ids: Tensor) -> Tensor:
            return table.lookup_table[ids] * D**0.5 + positions.lookup_table[: ids.shape[1]]

        memory = embed(self.enc_emb, self.enc_positional_encoding, source)
        for i in range(LAYERS):
            memory = mix(getattr(self, f"enc_self_attention_{i}"), memory, memory, keep[:, None])
            memory = think(getattr(self, f"enc_feed_forward_{i}"), memory)
        x = embed(self.dec_emb, self.dec_positional_encoding, target)
        for i in range(LAYERS):
            x = mix(getattr(self, f"dec_self_attention_{i}"), x, x, causal(target))
            x = mix(getattr(self, f"dec_vanilla_attention_{i}"), x, memory, keep[:, None])
            x = think(getattr(self, f"dec_feed_forward_{i}"), x)
        return self.logits_layer(x)
