"""Convert the preprocessor_config.json of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfexport.errors import CheckpointError, ConfigError, raise_all, shortened
from tfexport.features.config import AudioConfig, FeatureConfig, ImageConfig

PREPROCESSOR = "preprocessor_config.json"

_Settings = Mapping[str, Any]
_RESAMPLE: Mapping[int, Any] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # the numbers of Pillow
_TYPES: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
}
# Defaults of transformers, which may be missing in the files.
_AUDIO: _Settings = {"sampling_rate": 16_000, "padding_side": "right", "dither": 0.0}
_WHISPER = {**_AUDIO, "feature_size": 80, "hop_length": 160, "chunk_length": 30, "n_fft": 400, "padding_value": 0.0}
_CMVN = {"do_ceptral_normalize": True, "normalize_means": True, "normalize_vars": True}
_SPEECH2TEXT = {**_AUDIO, **_CMVN, "num_mel_bins": 80}
_WAV2VEC2 = {**_AUDIO, "feature_size": 1, "do_normalize": True}
_RESIZE = {"do_resize": True, "size": 224, "resample": 2, "do_center_crop": False, "crop_size": None, "do_pad": False}
_NORMALIZE = {"do_normalize": True, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_VIT = {**_RESIZE, **_NORMALIZE, "do_rescale": True, "rescale_factor": 1 / 255}
_DEIT = {**_VIT, "size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224}


def read_processor(settings: _Settings, subject: str = PREPROCESSOR) -> FeatureConfig:
    """Convert the settings of a Hugging Face feature extractor or image processor.

    Images have the values of the processors that use Pillow. Those that use torchvision resize differently: a pixel
    differs by up to one of its 256 levels with the bilinear filter, and by about ten at sharp edges with bicubic.

    Args:
        settings: the object of preprocessor_config.json, or of processor_config.json, which contains it.
        subject: what errors begin with.

    Raises:
        CheckpointError: it lists every setting that cannot be reproduced.
    """
    settings = settings.get("feature_extractor") or settings.get("image_processor") or settings
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
    kind = kind.removesuffix("Fast").replace("ImageProcessor", "FeatureExtractor")
    if kind not in _KINDS:
        expected = ", ".join(name.replace("FeatureExtractor", "") for name in _KINDS)
        raise CheckpointError(f"its type is {shortened(kind)}, expected that of {expected}", subject=subject)
    defaults, convert = _KINDS[kind]
    problems: list[str] = []
    # A value of null is the default, as in transformers.
    given = {key: value for key, value in settings.items() if value is not None and key in defaults}
    raise_all(CheckpointError, subject, [*_type_problems(given, defaults)], remedy="check the file")
    try:
        config = convert({**defaults, **given}, problems)
    except ConfigError as error:
        problems += error.problems
    raise_all(CheckpointError, subject, problems, remedy="tfexport cannot reproduce this processor")
    return config


def _type_problems(given: _Settings, defaults: _Settings) -> Iterator[str]:
    for key, value in given.items():
        kind = type(defaults[key])
        if kind in _TYPES and key not in ("size", "crop_size"):
            allowed, expected = _TYPES[kind]
            if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
                yield f"{key} is {shortened(value)}, expected {expected}"


def _expect(settings: _Settings, problems: list[str], **expected: object) -> None:
    for name, value in expected.items():
        if settings[name] != value:
            problems.append(f"{name} is {shortened(settings[name])}, expected {shortened(value)}")


def _whisper(settings: _Settings, problems: list[str]) -> FeatureConfig:
    _expect(settings, problems, sampling_rate=16_000, padding_side="right", dither=0, padding_value=0)
    hop, samples = max(settings["hop_length"], 1), settings["chunk_length"] * 16_000
    if samples % hop:
        problems.append(f"hop_length is {hop}, expected a factor of the {samples} samples of chunk_length")
    return AudioConfig(
        kind="log_mel",
        feature_dim=settings["feature_size"],
        window=settings["n_fft"],
        hop=settings["hop_length"],
        num_frames=samples // hop,
        max_seconds=settings["chunk_length"],
    )


def _speech2text(settings: _Settings, problems: list[str]) -> FeatureConfig:
    _expect(settings, problems, sampling_rate=16_000, dither=0)
    is_normalized = settings["do_ceptral_normalize"]
    return AudioConfig(
        kind="fbank",
        feature_dim=settings["num_mel_bins"],
        subtract_mean=is_normalized and settings["normalize_means"],
        divide_by_std=is_normalized and settings["normalize_vars"],
    )


def _wav2vec2(settings: _Settings, problems: list[str]) -> FeatureConfig:
    _expect(settings, problems, feature_size=1)
    normalize = settings["do_normalize"]
    return AudioConfig(
        kind="waveform", feature_dim=1, rate=settings["sampling_rate"], subtract_mean=normalize, divide_by_std=normalize
    )


def _image(settings: _Settings, problems: list[str]) -> FeatureConfig:
    _expect(settings, problems, do_resize=True, do_pad=False)
    size = _edges(settings["size"], "size", problems)
    if settings["do_center_crop"] and _edges(settings["crop_size"], "crop_size", problems) != size:
        problems.append(f"crop_size is {shortened(settings['crop_size'])}, expected {size}, or no do_center_crop")
    if (resample := settings["resample"]) not in _RESAMPLE:
        problems.append(f"resample is {shortened(resample)}, expected {', '.join(map(str, _RESAMPLE))}")
    normalize = settings["do_normalize"]
    return ImageConfig(
        **size,
        resample=_RESAMPLE.get(resample, "bilinear"),
        scale=settings["rescale_factor"] if settings["do_rescale"] else 1.0,
        mean=_per_channel(settings["image_mean"]) if normalize else (0.0,) * 3,
        std=_per_channel(settings["image_std"]) if normalize else (1.0,) * 3,
    )


def _edges(size: Any, name: str, problems: list[str]) -> dict[str, Any]:
    if type(size) is int:
        return {"height": size, "width": size}
    if isinstance(size, Mapping) and size.keys() == {"height", "width"}:
        return dict(size)
    problems.append(f"{name} is {shortened(size)}, expected a number, or height and width")
    return {"height": 224, "width": 224}


def _per_channel(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * 3


_KINDS: dict[str, tuple[_Settings, Callable[[_Settings, list[str]], FeatureConfig]]] = {
    "WhisperFeatureExtractor": (_WHISPER, _whisper),
    "Speech2TextFeatureExtractor": (_SPEECH2TEXT, _speech2text),
    "Wav2Vec2FeatureExtractor": (_WAV2VEC2, _wav2vec2),
    "ViTFeatureExtractor": (_VIT, _image),
    "DeiTFeatureExtractor": (_DEIT, _image),
}
