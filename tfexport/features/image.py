"""Read images and compute their features with Pillow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tfexport._io.extras import install_command
from tfexport.errors import BackendError, InputError, first_line
from tfexport.features.config import ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")  # Pillow runs other programs for some formats
_MAX_PIXELS = 100_000_000  # 300 MB as RGB
_CONVERT = "save it as PNG or JPEG"


def read_image(source: Path | bytes, name: str, channels: int) -> Image:
    """Decode an image file or its content and turn it upright as its EXIF data state.

    The first page or frame is used, and transparency is dropped.

    Raises:
        InputError: the file is damaged, too large or not an image.
        BackendError: Pillow is not installed.
    """
    pil = _pillow(name)
    try:
        with pil.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
            _check(image, name)
            image.load()
            return _converted(pil.ImageOps.exif_transpose(image), channels)
    except InputError:
        raise
    except (pil.Image.DecompressionBombError, pil.Image.DecompressionBombWarning) as error:
        raise InputError(
            f"has more than {_MAX_PIXELS} pixels ({first_line(error)})", subject=name, remedy="reduce it"
        ) from error
    except pil.UnidentifiedImageError as error:
        problem = f"is not an image in a supported format ({', '.join(_FORMATS)})"
        raise InputError(problem, subject=name, remedy=_CONVERT) from error
    except Exception as error:  # the decoders raise many types for damaged data
        raise InputError(f"is damaged ({first_line(error)})", subject=name, remedy="copy it again") from error


def array_image(pixels: NDArray[Any], name: str, config: ImageConfig) -> Image:
    """Convert pixels to an image.

    Args:
        pixels: [height, width] or [height, width, channels]; uint8, or floats of 0 to 1, which are rounded to 8 bits.
        name: what errors begin with.
        config: its number of channels is that of the image.
    """
    is_float = np.issubdtype(pixels.dtype, np.floating)
    is_shaped = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if not is_shaped or not pixels.size or not (is_float or pixels.dtype == np.uint8):
        shapes = "[height, width] or [height, width, channels] with 1, 3 or 4 channels"
        expected = f"uint8 or float {shapes}, or float features {list(config.shape)}"
        raise InputError(f"is {pixels.dtype} {list(pixels.shape)}, expected {expected}", subject=name)
    if is_float:
        if not (pixels.min() >= 0 and pixels.max() <= 1):  # also if there are NaNs
            problem = f"has values from {pixels.min():g} to {pixels.max():g}, expected 0 to 1"
            raise InputError(problem, subject=name, remedy="divide by 255, or convert to uint8")
        pixels = np.rint(pixels * 255.0).astype(np.uint8)
    image = _pillow(name).Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels))
    _check(image, name)
    return _converted(image, config.channels)


def image_features(image: Image, config: ImageConfig) -> NDArray[np.float32]:
    """Resize and normalize; returns float32 [channels, height, width]."""
    from PIL.Image import Resampling

    resized = image.resize((config.width, config.height), Resampling[config.resample.upper()])
    # In the precisions and the order of transformers, so that the results are equal.
    scaled = (np.asarray(resized, np.float64) * config.scale).astype(np.float32)
    scaled = scaled.reshape(config.height, config.width, config.channels)
    features = (scaled - np.array(config.mean, np.float32)) / np.array(config.std, np.float32)
    return np.ascontiguousarray(features.transpose(2, 0, 1))


def _check(image: Image, name: str) -> None:
    if image.width * image.height > _MAX_PIXELS:
        problem = f"has {image.width} x {image.height} pixels, expected at most {_MAX_PIXELS}"
        raise InputError(problem, subject=name, remedy="reduce it")
    if image.mode.startswith(("I", "F")):
        raise InputError("has pixels of more than 8 bits", subject=name, remedy="save it with 8 bits per channel")


def _converted(image: Image, channels: int) -> Image:
    return image.convert("L" if channels == 1 else "RGB")


def _pillow(name: str) -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps  # noqa: F401
    except ImportError as error:
        problem = f"reading images needs Pillow, which is not installed; {install_command('PIL')}"
        raise BackendError(problem, subject=name) from error
    return PIL
