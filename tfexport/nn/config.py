"""The configuration of a canonical transformer."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tfexport.config import MAX_SIZE, Config, Count, Ge, Heads, Help, Layers, Lt, Size, SizeOrZero
from tfexport.contract import Head, Labels, ModelSpec, Pooling, SpeechTokens, TokenIds
from tfexport.errors import ConfigError, shortened
from tfexport.nn.switches import (
    SWITCHES,
    Activation,
    FeedForward,
    Mixer,
    Norm,
    NormPlace,
    Parallel,
    Positions,
    QkNorm,
    RelativeBias,
    RotaryPairs,
    RotaryScaling,
    Value,
)
from tfexport.precision import Precision
from tfexport.sources import Convolution, FeatureSource, ImageSource

Side = Literal["encoder", "decoder"]
ConvolutionActivation = Literal["none", "tanh", "glu", Activation]


class ConvolutionConfig(Convolution, subject="convolution"):
    """One convolution before the encoder, and what follows it."""

    channels: Annotated[Size, Help("channels that are left after the activation")]
    activation: Annotated[
        ConvolutionActivation, Help("`glu` has twice the channels, and multiplies half of them by σ(the others)")
    ] = "none"
    bias: bool = True
    group_norm: Annotated[bool, Help("after the activation, a norm of all channels and frames of a source")] = False


class FeaturesConfig(Config, subject="features"):
    """How an encoder reads features [frames, dim]: convolutions, then a linear map."""

    dim: Annotated[Size, Help("features of a frame")]
    convolutions: Annotated[tuple[ConvolutionConfig, ...], Help("convolutions along the frames, in order")] = ()
    conv2d: Annotated[bool, Help("square convolutions along frames and features, from one channel")] = False
    projection: Annotated[bool, Help("a linear map to d_model, which the channels are without it")] = True
    frames: Annotated[Size | None, Help("number of frames of every source; None: it varies")] = None

    def _problems(self) -> Iterator[str]:
        if self.width <= 0:
            yield f"dim is {self.dim}, of which the convolutions leave nothing; raise it"

    @property
    def width(self) -> int:
        """Width of a position after the convolutions."""
        if not self.convolutions:
            return self.dim
        columns = self.source.positions(self.dim) if self.conv2d else 1
        return self.convolutions[-1].channels * int(columns)

    @property
    def source(self) -> FeatureSource:
        """What the encoder reads, for the specification."""
        shapes = ({name: getattr(each, name) for name in ("kernel", "stride", "padding")} for each in self.convolutions)
        return FeatureSource(
            dim=self.dim, convolutions=tuple(Convolution(**shape) for shape in shapes), frames=self.frames
        )


class ImageConfig(Config, subject="image"):
    """How an encoder reads an image: a linear map of each patch, row by row."""

    channels: Size
    height: Size
    width: Size
    patch_height: Annotated[Size, Help("patches do not overlap, and a rest of the image is not read")]
    patch_width: Size
    class_tokens: Annotated[Count, Help("learned vectors before the patches, such as a class token")] = 0

    def _problems(self) -> Iterator[str]:
        if self.patch_height > self.height or self.patch_width > self.width:
            patch, image = f"{self.patch_height} x {self.patch_width}", f"{self.height} x {self.width}"
            yield f"patches are {patch}, which do not fit into an image of {image}; change one of them"

    @property
    def source(self) -> ImageSource:
        """What the encoder reads, for the specification."""
        patches = (self.height // self.patch_height) * (self.width // self.patch_width)
        return ImageSource(
            channels=self.channels, height=self.height, width=self.width, positions=patches + self.class_tokens
        )


class StackConfig(Config, subject="stack"):
    """Sizes and norm placement of one side, encoder or decoder.

    The last fields replace settings of the model for this side.
    """

    layers: Layers
    num_heads: Heads
    d_ff: Size
    norm_place: Annotated[NormPlace, Help("norm(x + f(x)); x + f(norm(x)); x + norm(f(norm(x)))")]
    final_norm: Annotated[bool, Help("a norm after the last layer")]
    mixer: Annotated[Mixer, Help("what reads earlier tokens: self-attention, or in a decoder `ssru` or `average`")] = (
        "attention"
    )
    d_k: Annotated[Size | None, Help("width of a head's queries and keys; None: d_model / num_heads")] = None
    d_v: Annotated[Size | None, Help("width of a head's values; None: d_model / num_heads")] = None
    num_kv_heads: Annotated[Heads | None, Help("neighboring heads share keys and values; None: num_heads")] = None
    residual_scale: Annotated[float, Help("factor on x in the residual sum")] = 1.0
    parallel: Annotated[Parallel, Help("attention that reads the same x as the feed-forward network")] = "none"
    d_model: Annotated[Size | None, Help("width of an encoder if its decoder has another; None: the model's")] = None
    embedding_scale: Annotated[float | None, Help("None: the model's")] = None
    embedding_norm: Annotated[bool | None, Help("None: the model's")] = None
    norm_eps: Annotated[float | None, Ge(0), Help("None: the model's")] = None
    activation: Annotated[Activation | None, Help("None: the model's")] = None
    feed_forward: Annotated[FeedForward | None, Help("None: the model's")] = None

    def _problems(self) -> Iterator[str]:
        if self.parallel != "none" and self.norm_place == "post":
            yield f"parallel is {self.parallel}, which needs another norm_place than post; change one of them"
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            shared = f"num_kv_heads is {self.num_kv_heads}, which does not divide num_heads {self.num_heads}"
            yield f"{shared}; change one of them"


class TransformerConfig(Config, subject="model"):
    """The canonical transformer: sizes and switches; `decoder` None for encoder-only.

    The encoder reads token ids of `source_vocab`, `features` or an `image`; the other two are 0 or None.
    """

    d_model: Size
    max_source_length: Annotated[Size, Help("rows of the position table, or only a limit if there is none")]
    encoder: StackConfig
    decoder: StackConfig | None
    tokens: TokenIds
    source_vocab: SizeOrZero = 0
    features: FeaturesConfig | None = None
    image: ImageConfig | None = None
    target_vocab: Size | None = None
    max_target_length: Size | None = None
    embedding_norm: Annotated[bool, Help("a norm after embedding + position")] = False
    norm: Annotated[
        Norm,
        Help("(x − mean)/√(biased var + eps); (x − mean)/(unbiased std + eps); x/√(mean x² + eps), without bias"),
    ] = "layernorm"
    norm_eps: Annotated[float, Ge(0), Help("eps in `norm`")] = 1e-5
    qk_norm: Annotated[QkNorm, Help("norm on queries and keys before rotation: per head, or all heads together")] = (
        "none"
    )
    activation: Annotated[
        Activation, Help("`gelu` is exact, `quick_gelu` is `x sigmoid(1.702 x)`, `relu2` is squared `relu`")
    ] = "relu"
    feed_forward: Annotated[FeedForward, Help("fc2(act(fc1 x)), or fc2(act(fc1 x) · gate x)")] = "mlp"
    relative_bias: Annotated[
        RelativeBias, Help("learned by head and distance, a table per side or per layer; `alibi`: −distance · slope")
    ] = "none"
    relative_buckets: int = 32
    relative_max_distance: Annotated[Size, Help("distances from here on share the last bucket")] = 128
    positions: Annotated[Positions, Help("a stored table; `rotary` rotates queries and keys of self-attention")] = (
        "table"
    )
    rotary_base: Annotated[float, Help("pair i is rotated by position · base^(−2i / dim), in float32")] = 10000.0
    rotary_dim: Annotated[Size | None, Help("number of rotated columns of a head, from the first; None: d_k")] = None
    rotary_scaling: Annotated[RotaryScaling, Help("divide all frequencies, or slow ones as in Llama 3")] = "none"
    rotary_factor: Annotated[float, Ge(1), Help("divisor of frequencies")] = 8.0
    rotary_original_length: Annotated[Size, Help("`llama3` divides frequencies below 1 to 4 turns in it")] = 8192
    rotary_pairs: Annotated[RotaryPairs, Help("pairs are i and i + dim/2, or 2i and 2i + 1")] = "halves"
    rotary_cross: Annotated[bool, Help("rotate queries and keys of cross-attention too")] = False
    embedding_scale: Annotated[float, Help("factor on what positions are added to; √d_model in the paper")] = 1.0
    attention_scale: Annotated[float | None, Help("factor on the scores; None: 1/√d_k")] = None
    attention_softcap: Annotated[
        float, Ge(0), Help("c · tanh(scores / c) before the bias and the mask; 0 for none")
    ] = 0.0
    logit_scale: Annotated[float, Help("factor on the logits, bias included")] = 1.0
    logit_softcap: Annotated[float, Ge(0), Help("c · tanh(logits / c); 0 for none")] = 0.0
    attention_bias: bool = True
    feed_forward_bias: bool = True
    norm_bias: bool = True
    output_bias: bool = True
    tie_embeddings: Annotated[bool, Help("share one table between encoder and decoder")] = False
    tie_output: Annotated[bool, Help("use the decoder's table as the output projection")] = False
    pooling: Annotated[
        Pooling, Help("vector of a text in an encoder-only model: mean or maximum over its tokens, or its first token")
    ] = "mean"
    head: Annotated[Head, Help("a linear map of an encoder-only model, of every token or of the pooled vector")] = (
        "none"
    )
    labels: Annotated[Labels, Help("names of the outputs of the head")] = ()
    speech: Annotated[SpeechTokens | None, Help("tokens of the prompts of a speech model")] = None
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1

    @classmethod
    def _upgraded(cls, data: dict[str, Any]) -> dict[str, Any]:
        # Earlier configurations had one residual scale for both sides.
        if "residual_scale" not in data:
            return data
        scale = {"residual_scale": data["residual_scale"]}
        sides = {side: {**scale, **data[side]} for side in ("encoder", "decoder") if isinstance(data.get(side), dict)}
        return {name: value for name, value in data.items() if name != "residual_scale"} | sides

    def _problems(self) -> Iterator[str]:
        for side in self._sides:
            stack, width = self.stack(side), self.width(side)
            if width % stack.num_heads and not (stack.d_k and stack.d_v):
                yield (
                    f"{side}.num_heads is {stack.num_heads}, which does not divide d_model {width}; "
                    f"change one of them or give {side}.d_k and {side}.d_v"
                )
        if self.stack(self._sides[-1]).d_model is not None:
            yield f"{self._sides[-1]}.d_model is given; leave it out and give that of the model"
        yield from self._source_problems()
        if self.relative_bias != "none" and not 4 <= self.relative_buckets <= MAX_SIZE:
            yield f"relative_buckets is {shortened(self.relative_buckets)}, expected 4 to {MAX_SIZE}"
        if self.positions == "rotary":
            yield from self._rotary_problems()
        if self.speech and max(self.speech.ids, default=-1) >= (self.target_vocab or 0):
            yield f"speech has the id {max(self.speech.ids)}, expected below target_vocab {self.target_vocab or 0}"
        yield from self._decoder_problems()
        if self.encoder.mixer != "attention":
            yield f"encoder.mixer is {self.encoder.mixer}, which only a decoder can have; use attention"
        if self.relative_bias != "none" and self.decoder and self.decoder.mixer != "attention":
            remedy = "which has no scores to add it to; set relative_bias to none"
            yield f"relative_bias is {self.relative_bias} with decoder.mixer {self.decoder.mixer}, {remedy}"

    def _source_problems(self) -> Iterator[str]:
        given = [name for name in ("source_vocab", "features", "image") if getattr(self, name)]
        if len(given) != 1:
            yield f"source_vocab, features and image: {len(given)} of them are given, expected one"
        front = self.features or self.image
        if front and (longest := front.source.fits(self.max_source_length)) > self.max_source_length:
            yield f"max_source_length is {self.max_source_length}, but every source has {longest} positions; raise it"
        width = self.width("encoder")
        if self.features and not self.features.projection and self.features.width != width:
            yield f"features have width {self.features.width}, expected d_model {width}; give them a projection"

    def _rotary_problems(self) -> Iterator[str]:
        if self.rotary_base <= 0:
            yield f"rotary_base is {self.rotary_base}, expected above 0"
        for side in self._sides:
            width, dim = self.d_k(side), self.rotary_dim or self.d_k(side)
            if dim % 2 or dim > width:
                yield f"rotary_dim is {dim}, expected an even number up to d_k {width} of the {side}"

    def _decoder_problems(self) -> Iterator[str]:
        has_decoder = self.decoder is not None
        for name in ("target_vocab", "max_target_length"):
            if has_decoder and getattr(self, name) is None:
                yield f"missing key {name}, needed with a decoder"
            elif not has_decoder and getattr(self, name) is not None:
                yield f"{name} is given but decoder is null; leave it out"
        for name, usual in (("pooling", "mean"), ("head", "none")):
            if has_decoder and getattr(self, name) != usual:
                yield f"{name} is {getattr(self, name)}, which needs an encoder-only model; leave it out"
        if (self.head == "none") == bool(self.labels) or len(set(self.labels)) < len(self.labels):
            yield f"head is {self.head} with {len(self.labels)} labels, expected none, or token or sequence with labels"
        if not has_decoder and (self.tie_embeddings or self.tie_output):
            yield "tie_embeddings and tie_output need a decoder; set both to false"
        elif self.tie_embeddings and self.target_vocab not in (None, self.source_vocab):
            yield (
                f"tie_embeddings needs equal vocabularies, got source_vocab {self.source_vocab} "
                f"and target_vocab {self.target_vocab}"
            )
        elif self.tie_embeddings and self.encoder.d_model not in (None, self.d_model):
            yield f"tie_embeddings needs equal widths, got {self.encoder.d_model} and d_model {self.d_model}"
        for name, token in dataclasses.asdict(self.tokens).items():
            is_target = self.target_vocab is not None and (name in ("start", "eos") or not self.source_vocab)
            vocabulary = "target_vocab" if is_target else "source_vocab"
            size = getattr(self, vocabulary)
            if token is not None and token >= size > 0:
                yield f"tokens.{name} is {token}, expected below {vocabulary} {size}"

    def switches(self) -> dict[str, Value]:
        """Return the value of every switch; a side's switches are `enc.NAME`, `dec.NAME`."""
        stacks = [("enc.", self.encoder), ("dec.", self.decoder)]
        return {
            prefix + name: getattr(holder, name)
            for name, switch in SWITCHES.items()
            for prefix, holder in (stacks if switch.per_side else [("", self)])
            if holder is not None
        }

    def uses(self, name: str) -> bool:
        """Return whether a switch has an effect in this model."""
        switch = SWITCHES[name]
        if name in ("head", "pooling"):
            return name == "pooling" and self.head == "sequence"
        if self.decoder is None and switch.acts in ("cross-attention", "output"):
            return False
        other, values = switch.where or ("", ())
        return not other or (getattr(self, other) in values and self.uses(other))

    def stack(self, side: Side) -> StackConfig:
        """Return the configuration of one side."""
        stack = self.encoder if side == "encoder" else self.decoder
        if stack is None:
            raise ConfigError("model: this is an encoder-only model without a decoder")
        return stack

    def value(self, side: Side, name: str) -> Any:
        """Return the value of a setting that a side can replace."""
        own = getattr(self.stack(side), name)
        return getattr(self, name) if own is None else own

    def width(self, side: Side) -> int:
        """Return d_model of one side."""
        return self.stack(side).d_model or self.d_model

    @property
    def _sides(self) -> tuple[Side, ...]:
        return ("encoder",) if self.decoder is None else ("encoder", "decoder")

    def num_kv_heads(self, side: Side) -> int:
        """Return the number of key-value heads of one side."""
        return self.stack(side).num_kv_heads or self.stack(side).num_heads

    def d_k(self, side: Side) -> int:
        """Return the width of one head's queries and keys."""
        return self.stack(side).d_k or self.width(side) // self.stack(side).num_heads

    def d_v(self, side: Side) -> int:
        """Return the width of one head's values."""
        return self.stack(side).d_v or self.width(side) // self.stack(side).num_heads


def model_spec(config: TransformerConfig, precision: Precision) -> ModelSpec:
    """Derive the specification of a canonical transformer."""
    spec = ModelSpec(
        d_model=config.d_model,
        source_vocab=config.source_vocab,
        features=config.features.source if config.features else None,
        image=config.image.source if config.image else None,
        max_source_length=config.max_source_length,
        tokens=config.tokens,
        precision=precision,
        pooling=config.pooling,
        head=config.head,
        labels=config.labels,
    )
    if config.decoder is None:
        return spec
    return dataclasses.replace(
        spec,
        vocab=config.target_vocab or 0,
        layers=config.decoder.layers,
        heads=config.decoder.num_heads,
        head_dim=config.d_k("decoder"),
        value_dim=config.d_v("decoder"),
        kv_heads=config.decoder.num_kv_heads,
        state_width=0 if config.decoder.mixer == "attention" else config.d_model,
        max_target_length=config.max_target_length or 0,
        speech=config.speech,
    )
