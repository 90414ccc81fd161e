"""Features of images, compared with the image processors of transformers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from transformers import DeiTImageProcessorPil, ViTImageProcessorPil

from tfexport.errors import BackendError, ConfigError, InputError
from tfexport.features.config import ImageConfig
from tfexport.features.processor import FeatureProcessor
from tfexport.importing.huggingface.processor import read_processor

SIZES = ((16, 16), (30, 300), (64, 900), (97, 31), (224, 224), (384, 384), (500, 333), (11, 640))
MODES = ("RGB", "L", "RGBA", "P", "1", "CMYK")
SMALL = FeatureProcessor.from_config(ImageConfig(height=32, width=48))


def pictures() -> Iterator[Image.Image]:
    """Yield 48 images with text."""
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        for mode in MODES:
            image = Image.fromarray(rng.integers(150, 256, (height, width, 3), dtype=np.uint8))
            font = ImageFont.load_default(max(8, height // 2))
            ImageDraw.Draw(image).text((2, height // 4), "Handwritten line 1847", (20, 40, int(width) % 200), font)
            yield image.convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "theirs",
    [
        ViTImageProcessorPil(size=384),
        ViTImageProcessorPil(size={"height": 64, "width": 400}, resample=1, image_mean=[0.485, 0.456, 0.406]),
        DeiTImageProcessorPil(do_center_crop=False, size=384),
        ViTImageProcessorPil(do_rescale=False, image_mean=[127.5] * 3, image_std=[127.5] * 3),
        ViTImageProcessorPil(do_normalize=False, resample=3),
    ],
)
def test_images_are_those_of_transformers(theirs: object, tmp_path: Path) -> None:
    config = read_processor(theirs.to_dict())
    ours = FeatureProcessor.from_config(config)
    for image in pictures():
        path = tmp_path / ("picture.tiff" if image.mode == "CMYK" else "picture.png")
        image.save(path)
        expected = theirs(str(path), return_tensors="np")["pixel_values"][0]
        assert expected.shape == config.shape
        np.testing.assert_array_equal(ours.extract(path), expected)
        if image.mode == "RGB":
            pixels = np.asarray(image)
            np.testing.assert_array_equal(ours.extract(pixels), expected)
            np.testing.assert_array_equal(ours.extract(pixels / np.float32(255)), expected)


def test_photos_are_turned_as_their_exif_data_state(tmp_path: Path) -> None:
    theirs = ViTImageProcessorPil(size=32)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 20, 3), dtype=np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6
    path = tmp_path / "photo.jpg"
    image.save(path, exif=exif)
    ours = FeatureProcessor.from_config(read_processor(theirs.to_dict()))
    np.testing.assert_array_equal(ours.extract(path), theirs(str(path), return_tensors="np")["pixel_values"][0])


def test_gray_features() -> None:
    config = ImageConfig(height=16, width=16, channels=1, mean=(0.0,), std=(1.0,), scale=1.0)
    image = next(pictures())
    found = FeatureProcessor.from_config(config).extract(saved(image))
    np.testing.assert_array_equal(found, np.asarray(image.convert("L"), np.float32)[None])


def test_computed_features_are_returned() -> None:
    features = SMALL.extract(np.zeros((8, 8), np.uint8))
    np.testing.assert_array_equal(SMALL.extract(features.astype(np.float64)), features)


def bomb() -> bytes:
    """Return a PNG whose header states 60000 x 60000 pixels."""
    data = saved(Image.new("L", (8, 8)))
    ihdr = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + data[24:29]
    import zlib

    return data[:12] + ihdr + zlib.crc32(ihdr).to_bytes(4, "big") + data[33:]


WHOLE = saved(Image.effect_noise((60, 60), 50))


@pytest.mark.parametrize(
    "source",
    [
        *(b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n", WHOLE[:40], WHOLE[:-500], bomb()),
        saved(Image.effect_noise((60, 60), 50), "JPEG")[:-300],
        saved(Image.fromarray(np.full((9, 9), 40_000, np.uint16))),
        *(np.zeros((0, 5), np.uint8), np.zeros((4, 4, 2), np.uint8), np.zeros((4, 4), np.int64)),
        *(np.full((4, 4), 1.5), np.full((4, 4), np.nan), np.full((3, 32, 48), np.nan), np.zeros((3, 32, 47))),
        *("missing.png", "/dev/zero", None),
    ],
)
def test_bad_images_are_one_line(source: object) -> None:
    with pytest.raises(InputError) as caught:
        SMALL.extract(source)
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BackendError, match="tfexport\\[image\\]"):
        SMALL.extract(WHOLE)


def test_each_channel_has_a_mean() -> None:
    with pytest.raises(ConfigError) as caught:
        ImageConfig(height=16, width=16, channels=1)
    assert len(caught.value.problems) == 2
