"""How near a step is to the machine's limit: the products alone are those of the step, and the table is whole."""

from __future__ import annotations

from pathlib import Path

import limits
import numpy as np
import pytest
from bounds.caches import cache_bytes
from bounds.products import bare_products
from click.testing import CliRunner
from safetensors.numpy import load_file

from tfexport.bundle.bundle import open_bundle
from tfexport.contract import WEIGHTS
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig

WAYS = ("random", "int8-throughput")


@pytest.fixture(scope="module")
def bundles(random_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return preset:tiny in fp32, which is named "random", and in int8."""
    narrow = tmp_path_factory.mktemp("bundles") / WAYS[1]
    config = ExportConfig(variants=("contrib",), precision="int8", optimize_for="throughput")
    export_bundle("preset:tiny", narrow, config, verify=False)
    return dict(zip(WAYS, (random_bundle, narrow), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_the_measured_products_are_all_products_of_a_step(way: str, bundles: dict[str, Path]) -> None:
    """Two layers of six matrices, query, key and value as one, and the vocabulary."""
    run = bare_products(bundles[way] / "decoder_contrib.onnx", 5, 1)
    arrays = [value.numpy() for value in run()]
    made = arrays[-13:]
    assert [array.shape for array in made] == [(5, width) for width in [192, 64, 64, 64, 256, 64] * 2 + [1000]]
    assert all(np.isfinite(array).all() and array.any() for array in made)


def test_a_measured_product_equals_numpy(bundles: dict[str, Path]) -> None:
    run = bare_products(bundles["random"] / "decoder_contrib.onnx", 5, 1)  # whose arrays live as long as it does
    *_, logits = arrays = [value.numpy() for value in run()]
    tensors = load_file(open_bundle(bundles["random"]).file(WEIGHTS))
    rows = next(array for array in arrays if array.shape == (5, 64))
    np.testing.assert_allclose(logits, rows @ tensors["out.weight"].T + tensors["out.bias"], atol=1e-4)


def test_caches_are_as_large_as_the_keys_and_values_of_a_step(bundles: dict[str, Path]) -> None:
    """Two layers of 64 numbers a token, keys and values: of 6 rows with 5 tokens each, of 3 sources with 7."""
    contract = open_bundle(bundles["random"]).manifest.graphs["decoder_contrib"].spec
    counted = cache_bytes(contract, sources=3, beams=2, source_length=7, filled=5)
    assert counted == 2 * 2 * 64 * 4 * (6 * 5 + 3 * 7)


def test_the_command_prints_a_row_of_numbers_for_each_cell(bundles: dict[str, Path]) -> None:
    run = ["--batch-size", "1,3", "--num-beams", "1,2", "--source-length", "7", "--rounds", "1", "--threads", "1"]
    done = CliRunner().invoke(limits.main, [*(str(path) for path in bundles.values()), *run])
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.output.splitlines() if line[:1] == "|"]
    assert [row[:4] for row in rows[2:]] == [
        [way, beams, batch, "7"] for way in WAYS for beams in "12" for batch in "13"
    ]
    assert all(float(cell.rstrip("%")) >= 0 for row in rows[2:] for cell in row[4:])
    assert all(float(row[4]) > 0 for row in rows[2:])


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    missing = CliRunner().invoke(limits.main, [str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "does not exist" in missing.output or "no bundle" in missing.output
    assert "from 1 on" in CliRunner().invoke(limits.main, [str(tmp_path), "--batch-size", "1,0"]).output
