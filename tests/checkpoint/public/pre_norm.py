"""Public models with norms in front of the sublayers, rebuilt: their keys, shapes and maths, not their code."""

from __future__ import annotations

import math

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
    waves_by_column,
)


class SamLynnEvans(nn.Module):
    """Its own norm; a table with a wavelength for every column."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(alpha=nn.Parameter(torch.ones(D)), bias=nn.Parameter(torch.zeros(D)))

        def norms(count: int) -> dict[str, Tree]:
            return {f"norm_{i}": norm() for i in range(1, count + 1)}

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("q_linear", "v_linear", "k_linear", "out")})

        def network() -> Tree:
            return Tree(linear_1=nn.Linear(D, 24), linear_2=nn.Linear(24, D))

        def side(vocab: int) -> Tree:
            return Tree(embed=Tree(embed=nn.Embedding(vocab, D)), pe=Tree(pe=waves_by_column()[None]), norm=norm())

        self.encoder, self.decoder = side(SOURCE), side(TARGET)
        self.encoder.layers = layers(lambda: Tree(**norms(2), attn=attention(), ff=network()))
        self.decoder.layers = layers(lambda: Tree(**norms(3), attn_1=attention(), attn_2=attention(), ff=network()))
        self.out = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return std_norm(x, part.alpha, part.bias, 1e-6)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.out(attend(part.q_linear(x), part.k_linear(memory), part.v_linear(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.linear_2(part.linear_1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embed.embed(ids) * math.sqrt(D) + side.pe.pe[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for layer in self.encoder.layers:
            y = normed(layer.norm_1, memory)
            memory = memory + mix(layer.attn, y, y, keep[:, None])
            memory = memory + think(layer.ff, normed(layer.norm_2, memory))
        memory, x = normed(self.encoder.norm, memory), embed(self.decoder, target)
        for layer in self.decoder.layers:
            y = normed(layer.norm_1, x)
            x = x + mix(layer.attn_1, y, y, causal(target))
            x = x + mix(layer.attn_2, normed(layer.norm_2, x), memory, keep[:, None])
            x = x + think(layer.ff, normed(layer.norm_3, x))
        return self.out(normed(self.decoder.norm, x))


class Tunz(nn.Module):
    """One table for all, under two names and without one at the output; the decoder starts from a vector of zeros."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(D, eps=1e-6)

        def attention() -> Tree:
            names = ("linear_q", "linear_k", "linear_v", "output_layer")
            return Tree(**{name: nn.Linear(D, D, bias=False) for name in names})

        def network() -> Tree:
            return Tree(layer1=nn.Linear(D, 24), layer2=nn.Linear(24, D))

        def encoder_layer() -> Tree:
            return Tree(self_attention_norm=norm(), self_attention=attention(), ffn_norm=norm(), ffn=network())

        def decoder_layer() -> Tree:
            return Tree(
                self_attention_norm=norm(),
                self_attention=attention(),
                enc_dec_attention_norm=norm(),
                enc_dec_attention=attention(),
                ffn_norm=norm(),
                ffn=network(),
            )

        half = D // 2
        steps = torch.arange(half, dtype=torch.float32) * -(math.log(10000.0) / (half - 1))
        self.register_buffer("inv_timescales", steps.exp())
        self.t_vocab_embedding = nn.Embedding(TARGET, D)
        self.decoder = Tree(layers=layers(decoder_layer), last_norm=norm())
        self.i_vocab_embedding = self.t_vocab_embedding
        self.encoder = Tree(layers=layers(encoder_layer), last_norm=norm())

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        """`target` are the inputs of the decoder, whose first id counts for nothing."""

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.output_layer(attend(part.linear_q(x), part.linear_k(memory), part.linear_v(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer2(part.layer1(x).relu())

        def placed(x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[1])[:, None] * self.get_buffer("inv_timescales")
            return x * D**0.5 + torch.cat((angle.sin(), angle.cos()), 1)

        table = self.t_vocab_embedding
        memory = placed(table(source).masked_fill(~keep[..., None], 0))
        for layer in self.encoder.layers:
            y = layer.self_attention_norm(memory)
            memory = memory + mix(layer.self_attention, y, y, keep[:, None])
            memory = memory + think(layer.ffn, layer.ffn_norm(memory))
        memory = self.encoder.last_norm(memory)
        x = placed(F.pad(table(target[:, 1:]), (0, 0, 1, 0)))
        for layer in self.decoder.layers:
            y = layer.self_attention_norm(x)
            x = x + mix(layer.self_attention, y, y, causal(target))
            x = x + mix(layer.enc_dec_attention, layer.enc_dec_attention_norm(x), memory, keep[:, None])
            x = x + think(layer.ffn, layer.ffn_norm(x))
        return self.decoder.last_norm(x) @ table.weight.T


class Devjwsong(nn.Module):
    """A table with a wavelength for every column, kept outside of the state dict; log-probabilities."""

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(layer=nn.LayerNorm(D, eps=1e-6))

        def norms(count: int) -> dict[str, Tree]:
            return {f"layer_norm_{i}": norm() for i in range(1, count + 1)}

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("w_q", "w_k", "w_v", "w_0")})

        def network() -> Tree:
            return Tree(linear_1=nn.Linear(D, 24), linear_2=nn.Linear(24, D))

        def encoder_layer() -> Tree:
            return Tree(**norms(2), multihead_attention=attention(), feed_forward=network())

        def decoder_layer() -> Tree:
            mixers = {"masked_multihead_attention": attention(), "multihead_attention": attention()}
            return Tree(**norms(3), **mixers, feed_forward=network())

        self.src_embedding, self.trg_embedding = nn.Embedding(SOURCE, D), nn.Embedding(TARGET, D)
        self.positional_encoder = Tree()
        vars(self.positional_encoder)["positional_encoding"] = waves_by_column()[None]
        self.encoder = Tree(layers=layers(encoder_layer), layer_norm=norm())
        self.decoder = Tree(layers=layers(decoder_layer), layer_norm=norm())
        self.output_linear = nn.Linear(D, TARGET)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.w_0(attend(part.w_q(x), part.w_k(memory), part.w_v(memory), seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.linear_2(part.linear_1(x).relu())

        def embed(table: nn.Module, ids: Tensor) -> Tensor:
            return table(ids) * math.sqrt(D) + self.positional_encoder.positional_encoding[:, : ids.shape[1]]

        memory = embed(self.src_embedding, source)
        for layer in self.encoder.layers:
            y = layer.layer_norm_1.layer(memory)
            memory = memory + mix(layer.multihead_attention, y, y, keep[:, None])
            memory = memory + think(layer.feed_forward, layer.layer_norm_2.layer(memory))
        memory, x = self.encoder.layer_norm.layer(memory), embed(self.trg_embedding, target)
        for layer in self.decoder.layers:
            y = layer.layer_norm_1.layer(x)
            x = x + mix(layer.masked_multihead_attention, y, y, causal(target))
            x = x + mix(layer.multihead_attention, layer.layer_norm_2.layer(x), memory, keep[:, None])
            x = x + think(layer.feed_forward, layer.layer_norm_3.layer(x))
        return self.output_linear(self.decoder.layer_norm.layer(x)).log_softmax(-1)


class Labml(nn.Module):
    """Sequence first; norms are named for what stands behind them."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            maps = {name: Tree(linear=nn.Linear(D, D)) for name in ("query", "key", "value")}
            return Tree(**maps, output=nn.Linear(D, D))

        def network() -> Tree:
            return Tree(layer1=nn.Linear(D, 24), layer2=nn.Linear(24, D))

        def encoder_layer() -> Tree:
            norms = {name: nn.LayerNorm(D) for name in ("norm_self_attn", "norm_ff")}
            return Tree(self_attn=attention(), feed_forward=network(), **norms)

        def decoder_layer() -> Tree:
            norms = {name: nn.LayerNorm(D) for name in ("norm_self_attn", "norm_src_attn", "norm_ff")}
            return Tree(self_attn=attention(), src_attn=attention(), feed_forward=network(), **norms)

        def embedding(vocab: int) -> Tree:
            return Tree(linear=nn.Embedding(vocab, D), positional_encodings=waves()[:, None])

        self.encoder = Tree(layers=layers(encoder_layer), norm=nn.LayerNorm(D))
        self.decoder = Tree(layers=layers(decoder_layer), norm=nn.LayerNorm(D))
        self.src_embed, self.tgt_embed = embedding(SOURCE), embedding(TARGET)
        self.generator = Tree(projection=nn.Linear(D, TARGET))

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            q, k, v = part.query.linear(x), part.key.linear(memory), part.value.linear(memory)
            return part.output(attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen).transpose(0, 1))

        def think(part: Tree, x: Tensor) -> Tensor:
            return part.layer2(part.layer1(x).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.linear(ids.T) * math.sqrt(D) + side.positional_encodings[: ids.shape[1]]

        memory = embed(self.src_embed, source)
        for layer in self.encoder.layers:
            y = layer.norm_self_attn(memory)
            memory = memory + mix(layer.self_attn, y, y, keep[:, None])
            memory = memory + think(layer.feed_forward, layer.norm_ff(memory))
        memory, x = self.encoder.norm(memory), embed(self.tgt_embed, target)
        for layer in self.decoder.layers:
            y = layer.norm_self_attn(x)
            x = x + mix(layer.self_attn, y, y, causal(target))
            x = x + mix(layer.src_attn, layer.norm_src_attn(x), memory, keep[:, None])
            x = x + think(layer.feed_forward, layer.norm_ff(x))
        return self.generator.projection(self.decoder.norm(x)).transpose(0, 1)


class JoeyNmt(nn.Module):
    """The norm of a layer is that of its attention, the network has its own; residuals may be scaled, here they are."""

    # DeepNet's factors for two layers on each side.
    alphas = 0.81 * (LAYERS**4 * LAYERS) ** (1 / 16), (3 * LAYERS) ** 0.25

    def __init__(self) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(D, eps=1e-6)

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("k_layer", "v_layer", "q_layer", "output_layer")})

        def network() -> Tree:
            return Tree(
                layer_norm=norm(), pwff_layer=nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, D))
            )

        def decoder_layer() -> Tree:
            mixers = {"trg_trg_att": attention(), "src_trg_att": attention()}
            return Tree(**mixers, feed_forward=network(), x_layer_norm=norm(), dec_layer_norm=norm())

        def encoder_layer() -> Tree:
            return Tree(layer_norm=norm(), src_src_att=attention(), feed_forward=network())

        self.src_embed, self.trg_embed = Tree(lut=nn.Embedding(SOURCE, D)), Tree(lut=nn.Embedding(TARGET, D))
        self.encoder = Tree(layers=layers(encoder_layer), pe=Tree(pe=waves()[None]), layer_norm=norm())
        self.decoder = Tree(layers=layers(decoder_layer), pe=Tree(pe=waves()[None]), layer_norm=norm())
        self.decoder.output_layer = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.output_layer(attend(part.q_layer(x), part.k_layer(memory), part.v_layer(memory), seen))

        def think(part: Tree, x: Tensor, alpha: float) -> Tensor:
            return part.pwff_layer(part.layer_norm(x)) + alpha * x

        def embed(table: Tree, side: Tree, ids: Tensor) -> Tensor:
            return table.lut(ids) * math.sqrt(D) + side.pe.pe[:, : ids.shape[1]]

        enc, dec = self.alphas
        memory = embed(self.src_embed, self.encoder, source)
        for layer in self.encoder.layers:
            y = layer.layer_norm(memory)
            memory = think(layer.feed_forward, mix(layer.src_src_att, y, y, keep[:, None]) + enc * memory, enc)
        memory, x = self.encoder.layer_norm(memory), embed(self.trg_embed, self.decoder, target)
        for layer in self.decoder.layers:
            y = layer.x_layer_norm(x)
            x = mix(layer.trg_trg_att, y, y, causal(target)) + dec * x
            x = mix(layer.src_trg_att, layer.dec_layer_norm(x), memory, keep[:, None]) + dec * x
            x = think(layer.feed_forward, x, dec)
        return self.decoder.output_layer(self.decoder.layer_norm(x))


class Sgrvinod(nn.Module):
    """Layers are lists of sublayers that hold their norms; keys and values are one map; one table for all."""

    width = 6

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            wide = HEADS * self.width
            maps = {
                "cast_queries": nn.Linear(D, wide),
                "cast_keys_values": nn.Linear(D, 2 * wide),
                "cast_output": nn.Linear(wide, D),
            }
            return Tree(**maps, layer_norm=nn.LayerNorm(D))

        def network() -> Tree:
            return Tree(layer_norm=nn.LayerNorm(D), fc1=nn.Linear(D, 20), fc2=nn.Linear(20, D))

        shared = nn.Embedding(TARGET, D)
        self.encoder = Tree(
            embedding=shared,
            encoder_layers=layers(lambda: nn.ModuleList((attention(), network()))),
            layer_norm=nn.LayerNorm(D),
        )
        self.decoder = Tree(
            embedding=shared,
            decoder_layers=layers(lambda: nn.ModuleList((attention(), attention(), network()))),
            layer_norm=nn.LayerNorm(D),
            fc=nn.Linear(D, TARGET),
        )
        self.decoder.fc.weight = shared.weight
        self.positional_encoding = waves()[None]

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor | None, seen: Tensor) -> Tensor:
            y = part.layer_norm(x)
            k, v = part.cast_keys_values(y if memory is None else memory).chunk(2, -1)
            return x + part.cast_output(attend(part.cast_queries(y), k, v, seen))

        def think(part: Tree, x: Tensor) -> Tensor:
            return x + part.fc2(part.fc1(part.layer_norm(x)).relu())

        def embed(side: Tree, ids: Tensor) -> Tensor:
            return side.embedding(ids) * math.sqrt(D) + self.positional_encoding[:, : ids.shape[1]]

        memory = embed(self.encoder, source)
        for attention, network in self.encoder.encoder_layers:
            memory = think(network, mix(attention, memory, None, keep[:, None]))
        memory, x = self.encoder.layer_norm(memory), embed(self.decoder, target)
        for attention, across, network in self.decoder.decoder_layers:
            x = think(network, mix(across, mix(attention, x, None, causal(target)), memory, keep[:, None]))
        return self.decoder.fc(self.decoder.layer_norm(x))


class XTransformers(nn.Module):
    """Sublayers in one list for each side; norms without bias store gain - 1; learned positions are scaled down."""

    width = 6

    def __init__(self) -> None:
        super().__init__()

        def norm() -> Tree:
            return Tree(gamma=nn.Parameter(torch.zeros(D)))

        def sublayer(block: Tree) -> nn.ModuleList:
            return nn.ModuleList((nn.ModuleList((norm(),)), block))

        def attention() -> nn.ModuleList:
            wide = HEADS * self.width
            maps = {name: nn.Linear(D, wide, bias=False) for name in ("to_q", "to_k", "to_v")}
            return sublayer(Tree(**maps, to_out=nn.Linear(wide, D, bias=False)))

        def network() -> nn.ModuleList:
            first = nn.Sequential(nn.Linear(D, 20), nn.GELU())
            return sublayer(Tree(ff=nn.Sequential(first, nn.Dropout(), nn.Linear(20, D))))

        def side(vocab: int, kinds: str) -> Tree:
            made = [attention() if kind != "f" else network() for kind in kinds * LAYERS]
            return Tree(
                token_emb=Tree(emb=nn.Embedding(vocab, D)),
                pos_emb=Tree(emb=nn.Embedding(LENGTH, D)),
                attn_layers=Tree(layers=nn.ModuleList(made), final_norm=norm()),
            )

        self.encoder = side(SOURCE, "af")
        self.decoder = Tree(net=side(TARGET, "acf"))
        self.decoder.net.to_logits = nn.Linear(D, TARGET, bias=False)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def normed(part: Tree, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,)) * (part.gamma + 1)

        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.to_out(attend(part.to_q(x), part.to_k(memory), part.to_v(memory), seen))

        def run(side: Tree, ids: Tensor, memory: Tensor | None, seen: Tensor) -> Tensor:
            x = side.token_emb.emb(ids) + side.pos_emb.emb.weight[: ids.shape[1]] * D**-0.5
            for place, ((norm,), block) in enumerate(side.attn_layers.layers):
                y = normed(norm, x)
                if hasattr(block, "ff"):
                    x = x + block.ff(y)
                elif memory is not None and place % 3 == 1:
                    x = x + mix(block, y, memory, keep[:, None])
                else:
                    x = x + mix(block, y, y, seen)
            return normed(side.attn_layers.final_norm, x)

        memory = run(self.encoder, source, None, keep[:, None])
        return self.decoder.net.to_logits(run(self.decoder.net, target, memory, causal(target)))


class Sooftware(nn.Module):
    """An encoder with norms behind the sublayers and a decoder with norms in front of them, without a final one."""

    def __init__(self) -> None:
        super().__init__()

        def attention() -> Tree:
            return Tree(**{name: nn.Linear(D, D) for name in ("linear_q", "linear_k", "linear_v", "linear")})

        def network() -> Tree:
            maps = nn.Linear(D, 24), nn.Dropout(), nn.ReLU(), nn.Linear(24, D)
            return Tree(feed_forward=nn.Sequential(*maps))

        def add_norm(inner: Tree) -> Tree:
            return Tree(sublayer=inner, layer_norm=nn.LayerNorm(D))

        def decoder_layer() -> Tree:
            names = ("self_attention_prenorm", "decoder_attention_prenorm", "feed_forward_prenorm")
            return Tree(
                **{name: nn.LayerNorm(D) for name in names},
                self_attention=attention(),
                decoder_attention=attention(),
                feed_forward=network(),
            )

        def embedding(vocab: int) -> Tree:
            return Tree(embedding=nn.Embedding(vocab, D))

        self.encoder = Tree(
            embedding=embedding(SOURCE),
            pos_encoding=Tree(pe=waves()[None]),
            layers=layers(lambda: Tree(self_attention=add_norm(attention()), feed_forward=add_norm(network()))),
        )
        self.decoder = Tree(
            embedding=embedding(TARGET),
            positional_encoding=Tree(pe=waves()[None]),
            layers=layers(decoder_layer),
            fc=nn.Linear(D, TARGET, bias=False),
        )

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        def mix(part: Tree, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
            return part.linear(attend(part.linear_q(x), part.linear_k(memory), part.linear_v(memory), seen))

        memory = self.encoder.embedding.embedding(source) * math.sqrt(D)
        memory = memory + self.encoder.pos_encoding.pe[:, : source.shape[1]]
        for layer in self.encoder.layers:
            part = layer.self_attention
            memory = part.layer_norm(mix(part.sublayer, memory, memory, keep[:, None]) + memory)
            part = layer.feed_forward
            memory = part.layer_norm(part.sublayer.feed_forward(memory) + memory)
        x = self.decoder.embedding.embedding(target) * math.sqrt(D)
        x = x + self.decoder.positional_encoding.pe[:, : target.shape[1]]
        for layer in self.decoder.layers:
            y = layer.self_attention_prenorm(x)
            x = x + mix(layer.self_attention, y, y, causal(target))
            x = x + mix(layer.decoder_attention, layer.decoder_attention_prenorm(x), memory, keep[:, None])
            x = x + layer.feed_forward.feed_forward(layer.feed_forward_prenorm(x))
        return self.decoder.fc(x).log_softmax(-1)
