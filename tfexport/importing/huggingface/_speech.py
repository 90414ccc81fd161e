"""Define Speech2Text and Moonshine, which read audio."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, normalizers

from tfexport._arguments import is_whole
from tfexport._io.names import TOKENIZER
from tfexport.contract import ModelSpec
from tfexport.errors import shortened
from tfexport.importing.huggingface import Family, Reader
from tfexport.importing.huggingface.tokenizer import SETTINGS, read_ids, read_json_object, stripped
from tfexport.importing.vocabulary import SPM_BPE, read_sentencepiece, with_ids
from tfexport.nn.config import ConvolutionConfig, FeaturesConfig
from tfexport.nn.switches import Value

# Values of transformers for keys that a config.json may lack.
_SPEECH2TEXT = {
    "encoder_layers": 12,
    "decoder_layers": 6,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "activation_function": "relu",
    "scale_embedding": True,
    "d_model": 256,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "max_source_positions": 6000,
    "max_target_positions": 1024,
    "conv_kernel_sizes": (5, 5),
    "conv_channels": 1024,
    "input_feat_per_channel": 80,
    "input_channels": 1,
}
_MOONSHINE = {
    "encoder_num_hidden_layers": 6,
    "decoder_num_hidden_layers": 6,
    "hidden_size": 288,
    "encoder_num_attention_heads": 8,
    "decoder_num_attention_heads": 8,
    "encoder_hidden_act": "gelu",
    "decoder_hidden_act": "silu",
    "max_position_embeddings": 512,
}


def _speech2text(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    for side in ("encoder", "decoder"):
        reader.check_layers(f"{side}_layers", side, keys)
    start, pad = reader.config["decoder_start_token_id"], reader.config["pad_token_id"]
    if not is_whole(pad) or pad in (0, start):  # transformers gives frames or the start token no position then
        reader.problems.append(f"pad_token_id is {shortened(pad)}, expected neither 0 nor decoder_start_token_id")
    return {
        **reader.activation("activation_function", reader.config["activation_function"]),
        "embedding_scale": "sqrt(d_model)" if reader.config["scale_embedding"] else 1.0,
        "num_heads": reader.whole("encoder_attention_heads"),
        "dec.num_heads": reader.whole("decoder_attention_heads"),
        "enc.max_length": reader.whole("max_source_positions"),
        "dec.max_length": reader.whole("max_target_positions"),
    }


def _filter_banks(reader: Reader) -> FeaturesConfig | None:
    kernels = reader.config["conv_kernel_sizes"]
    if not isinstance(kernels, list | tuple) or not all(type(n) is int and n % 2 for n in kernels):
        reader.problems.append(f"conv_kernel_sizes is {shortened(kernels)}, expected odd numbers")
        return None
    channels = [reader.whole("conv_channels") // 2] * (len(kernels) - 1) + [reader.whole("d_model")]
    return FeaturesConfig(
        dim=reader.whole("input_feat_per_channel") * reader.whole("input_channels"),
        convolutions=tuple(
            ConvolutionConfig(kernel=kernel, stride=2, padding=kernel // 2, channels=count, activation="glu")
            for kernel, count in zip(kernels, channels, strict=True)
        ),
        projection=False,
    )


def _convert(directory: Path, spec: ModelSpec) -> dict[str, Inner]:
    settings, ids = read_json_object(directory / SETTINGS), read_ids(directory / "vocab.json")
    languages = [token for token in ids if token.startswith("<lang:")] if settings.get("lang_codes") else []
    special = ("<s>", "<pad>", "</s>", "<unk>", *languages)
    inner = stripped(with_ids(read_sentencepiece(directory / SPM_BPE), ids, special, "<unk>"))
    if settings.get("do_lower_case"):
        others = [inner.normalizer] if inner.normalizer else []
        inner.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
    if settings.get("do_upper_case"):
        letters = sorted({letter for token in ids for letter in token if letter != letter.upper()})
        inner.decoder = decoders.Sequence([inner.decoder, *(decoders.Replace(a, a.upper()) for a in letters)])
    return {TOKENIZER: inner}


def _moonshine(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    for side in ("encoder", "decoder"):
        reader.check_layers(f"{side}_num_hidden_layers", side, keys)
    # The attention of transformers splits its queries into as many heads as its keys, and both sides alike.
    heads = reader.whole("encoder_num_attention_heads")
    for name in ("decoder_num_attention_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"):
        if (value := reader.config.get(name)) not in (None, heads):
            reader.problems.append(f"{name} is {shortened(value)}, expected encoder_num_attention_heads, {heads}")
    width = reader.whole("hidden_size") // max(heads, 1)
    return {
        **reader.activation("encoder_hidden_act", reader.config["encoder_hidden_act"]),
        **{
            f"dec.{k}": v
            for k, v in reader.activation("decoder_hidden_act", reader.config["decoder_hidden_act"]).items()
        },
        "num_heads": heads,
        "rotary_base": reader.rotary("rope_theta", 10000.0),
        "rotary_dim": int(width * reader.rotary("partial_rotary_factor", 0.9)),
        "dec.max_length": reader.whole("max_position_embeddings"),
    }


def _waveform(reader: Reader) -> FeaturesConfig:
    width = reader.whole("hidden_size")
    return FeaturesConfig(
        dim=1,
        convolutions=(
            ConvolutionConfig(kernel=127, stride=64, channels=width, activation="tanh", bias=False, group_norm=True),
            ConvolutionConfig(kernel=7, stride=3, channels=2 * width, activation="gelu"),
            ConvolutionConfig(kernel=3, stride=2, channels=width, activation="gelu"),
        ),
        projection=False,
    )


FAMILIES = (
    Family(
        "speech_to_text",
        lambda _: "hf_speech_to_text",
        _speech2text,
        ("Speech2TextTokenizer",),
        _SPEECH2TEXT,
        unused=("model.*coder.embed_positions.weights",),
        features=_filter_banks,
        convert=_convert,
    ),
    Family(
        "moonshine",
        lambda _: "hf_moonshine",
        _moonshine,
        ("PreTrainedTokenizerFast",),
        _MOONSHINE,
        head="proj_out.weight",
        features=_waveform,
        arrange=lambda features: features[..., 0],
    ),
)
