"""Convert preprocessor_config.json, and compare the result with transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tfexport.bundle.processor import Comparison, ProcessorConfig
from tfexport.contract import ModelSpec
from tfexport.errors import BackendError, CheckpointError, ConfigError, raise_all, raised_by, shortened
from tfexport.features.config import AudioConfig, FeatureConfig, ImageConfig
from tfexport.importing.huggingface.tokenizer import need_transformers, read_json_object
from tfexport.importing.preprocessing import compare_processor

PREPROCESSOR, PROCESSORS = "preprocessor_config.json", "processor_config.json"
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
    settings = _nested(settings) or settings
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


def directory_processor(
    directory: Path, spec: ModelSpec, *, compare: bool
) -> tuple[ProcessorConfig | None, tuple[str, ...]]:
    """Convert the processor of a directory and compare it with that of transformers.

    Also returns notes. It is None if the directory has none that tfexport can reproduce.

    Raises:
        ParityError: it computes other features than transformers.
    """
    nested = read_json_object(directory / PROCESSORS)
    name = PROCESSORS if _nested(nested) else PREPROCESSOR  # the same order as in transformers
    settings = nested if name == PROCESSORS else read_json_object(directory / name)
    if not settings:
        return None, (f"there is no {PREPROCESSOR}: the model reads features that you compute",)
    try:
        found = read_processor(settings, name)
        kind = "audio" if isinstance(found, AudioConfig) else "image"
        config = ProcessorConfig(**{kind: found})  # type: ignore[arg-type]  # a field for each kind
        raise_all(CheckpointError, name, config.problems_for(spec))
    except CheckpointError as error:
        return None, (f"the directory's processor is not used: {error}",)
    reason = "--no-compare"
    if compare:
        try:
            config = dataclasses.replace(config, compared=_compared(directory, config, name))
        except BackendError as error:
            reason = str(error)
    if config.compared is None:
        return config, (f"the processor is that of {name}; it was not compared with transformers: {reason}",)
    result = f"{config.compared.inputs} inputs, largest error {config.compared.largest_error:.1e}"
    return config, (f"the processor is that of {name}; compared with {config.compared.original}: {result}",)


def _nested(settings: _Settings) -> Any:
    return settings.get("feature_extractor") or settings.get("image_processor")


def _compared(directory: Path, config: ProcessorConfig, name: str) -> Comparison:
    transformers, audio = need_transformers(directory), config.audio
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    kind = transformers.AutoFeatureExtractor if audio else transformers.AutoImageProcessor
    try:
        theirs = kind.from_pretrained(directory, **local, **({} if audio else {"backend": "pil"}))
    except Exception as error:
        raise BackendError(f"transformers cannot read it ({raised_by(error)})") from error

    def original(value: NDArray[Any], rate: int | None) -> NDArray[Any]:
        options = {"sampling_rate": rate} if audio else {}
        found: NDArray[Any] = theirs(value, **options, return_tensors="np")[theirs.model_input_names[0]][0]
        if audio and audio.kind == "waveform":
            return found[:, None]
        return found.T if audio and audio.kind == "log_mel" else found

    return compare_processor(
        config, original, f"{type(theirs).__name__} of transformers {transformers.__version__}", name
    )


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
