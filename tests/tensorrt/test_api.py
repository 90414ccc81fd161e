"""Every name of TensorRT that the code uses is in all versions that it runs on, or asked for before it is used.

The names come from the binding wheels of those versions: scripts/tensorrt_api records them.
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

# What one question answers for more names than its own: where the first is, the others are too.
ANSWERED_BY = {
    "ATTENTION_INPUT": {"IAttentionInputLayer", "attention", "decomposable", "causal"},
    "causal_kind": {"UPPER_LEFT"},
    "num_compute_capabilities": {"set_compute_capability", "ComputeCapability", "CURRENT"},
    "create_runtime_config": {"set_execution_context_allocation_strategy"},
    "cuda_graph_strategy": {"CudaGraphStrategy", "WHOLE_GRAPH_CAPTURE", "DISABLED"},
    "create_runtime_cache": {"set_runtime_cache", "get_runtime_cache", "deserialize"},
    "get_engine_validity": {"EngineValidity", "EngineInvalidityDiagnostics", "VALID", "SUBOPTIMAL", "INVALID"},
}
# What there is where the answer is no.
OTHERWISE = {"device_memory_size_v2": {"device_memory_size"}}
# Names of the API that our own classes have too: reading them is ours, and ours are never set.
OURS = {"precision"}


def having() -> dict[str, frozenset[str]]:
    """Return, for each name of any class, enum or of the module, the versions that have it somewhere."""
    found: dict[str, frozenset[str]] = {}
    for groups in RECORD["names"].values():
        for versions, names in groups.items():
            for name in names.split():
                found[name] = found.get(name, frozenset()) | frozenset(versions.split())
    return found


HAVING = having()


class Use(NamedTuple):
    """A name of the API in the code."""

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
    """Return the names that hasattr, or getattr with a default, asks for."""
    return {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
        and isinstance(node.args[1], ast.Constant)
    }


def unguarded(trees: list[ast.Module]) -> list[str]:
    """List each use of a name that a version lacks, in a file where nothing asks for it."""
    # A capability is asked for in one file and relied on in another: the bridge has the questions.
    asked = set().union(*(questions(tree) for tree in trees))
    answered = asked.union(*({*ANSWERED_BY.get(name, ()), *OTHERWISE.get(name, ())} for name in asked))
    return [
        f"{use.name} at line {use.line} is not in {', '.join(sorted(VERSIONS - HAVING[use.name]))}"
        for tree in trees
        for use in sorted(uses(tree))
        if HAVING[use.name] != VERSIONS and use.name not in answered
    ]


def test_every_name_is_everywhere_or_asked_for() -> None:
    assert not unguarded([ast.parse(path.read_text(encoding="utf-8")) for path in FILES])


@pytest.mark.parametrize("question", ANSWERED_BY)
def test_a_question_answers_for_what_it_is_said_to(question: str) -> None:
    for name in ANSWERED_BY[question]:
        assert HAVING[name] >= HAVING[question], f"{question} says nothing of {name}"


@pytest.mark.parametrize("question", OTHERWISE)
def test_where_the_answer_is_no_there_is_something_else(question: str) -> None:
    assert all(HAVING[name] >= VERSIONS - HAVING[question] for name in OTHERWISE[question])


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
