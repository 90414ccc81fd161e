"""Every name of TensorRT in the code exists in all supported versions, or `hasattr` is called before its use.

`scripts/tensorrt_api` records the names from the wheels of these versions.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

RECORD = json.loads((Path(__file__).parent / "data" / "tensorrt_api.json").read_text(encoding="utf-8"))
VERSIONS = frozenset(RECORD["sources"])
FILES = sorted((ROOT / "tfexport" / "tensorrt").rglob("*.py"))

# Versions that have the first name have the others too.
ANSWERED_BY = {
    "ATTENTION_INPUT": {"IAttentionInputLayer", "attention", "decomposable", "causal"},
    "causal_kind": {"UPPER_LEFT"},
    "num_compute_capabilities": {"set_compute_capability", "ComputeCapability", "CURRENT"},
    "create_runtime_config": {"set_execution_context_allocation_strategy"},
    "cuda_graph_strategy": {"CudaGraphStrategy", "WHOLE_GRAPH_CAPTURE", "DISABLED"},
    "create_runtime_cache": {"set_runtime_cache", "get_runtime_cache", "deserialize"},
    "get_engine_validity": {"EngineValidity", "EngineInvalidityDiagnostics", "VALID", "SUBOPTIMAL", "INVALID"},
}
# Versions that do not have the first name have the others.
OTHERWISE = {"device_memory_size_v2": {"device_memory_size"}}
# Attributes that our own classes have too; ours are never set.
OURS = {"precision", "mask"}


def having() -> dict[str, frozenset[str]]:
    """Return the versions that have each name in any class, enum or the module."""
    found: dict[str, frozenset[str]] = {}
    for groups in RECORD["names"].values():
        for versions, names in groups.items():
            for name in names.split():
                found[name] = found.get(name, frozenset()) | frozenset(versions.split())
    return found


HAVING = having()


class Use(NamedTuple):
    name: str
    line: int


def uses(tree: ast.Module) -> set[Use]:
    """Find attributes, and the texts that name a flag or another member of an enum."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in HAVING:
            if node.attr in OURS and isinstance(node.ctx, ast.Load):
                continue
            found.add(Use(node.attr, node.lineno))
        elif isinstance(node, ast.Constant) and node.value in HAVING and str(node.value).isupper():
            found.add(Use(str(node.value), node.lineno))
    return found


def questions(tree: ast.Module) -> set[str]:
    """Return the names in calls of hasattr, and of getattr with a default."""
    return {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
        and isinstance(node.args[1], ast.Constant)
    }


def unguarded(trees: list[ast.Module]) -> list[str]:
    """List each use of a name that a version lacks and that no file checks."""
    asked = set().union(*(questions(tree) for tree in trees))
    answered = asked.union(*({*ANSWERED_BY.get(name, ()), *OTHERWISE.get(name, ())} for name in asked))
    return [
        f"{use.name} at line {use.line} is not in {', '.join(sorted(VERSIONS - HAVING[use.name]))}"
        for tree in trees
        for use in sorted(uses(tree))
        if HAVING[use.name] != VERSIONS and use.name not in answered
    ]


def test_every_name_exists_in_all_versions_or_is_checked() -> None:
    assert not unguarded([ast.parse(path.read_text(encoding="utf-8")) for path in FILES])


def test_one_check_covers_the_names_that_are_listed() -> None:
    for question, names in ANSWERED_BY.items():
        assert all(HAVING[name] >= HAVING[question] for name in names), question
    for question, names in OTHERWISE.items():
        assert all(HAVING[name] >= VERSIONS - HAVING[question] for name in names), question


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("engine.device_memory_size", "device_memory_size"),
        ("context.all_shape_inputs_specified", "all_shape_inputs_specified"),
        ("layer.precision = trt.DataType.HALF", "precision"),
        ("config.set_flag(getattr(trt.BuilderFlag, 'FP16'))", "FP16"),
        ("engine.get_aliased_input_tensor(name)", "get_aliased_input_tensor"),
        ("getattr(engine, 'get_aliased_input_tensor').x; engine.get_aliased_input_tensor", "get_aliased_input_tensor"),
    ],
)
def test_a_name_that_a_version_lacks_is_found(code: str, name: str) -> None:
    (problem,) = unguarded([ast.parse(code)])
    assert problem.startswith(name)


def test_the_record_is_that_of_the_installed_library() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    if trt.__version__ not in VERSIONS:
        pytest.skip(f"tensorrt-rtx {trt.__version__} is not recorded; run scripts/tensorrt_api with it added")
    for owner, groups in RECORD["names"].items():
        recorded = {
            name for versions, names in groups.items() if trt.__version__ in versions.split() for name in names.split()
        }
        assert not recorded or recorded <= set(dir(getattr(trt, owner) if owner else trt))
