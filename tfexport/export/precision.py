"""Write the graphs of a model in a precision: a model's, or those of a bundle anew from the weights that it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tfexport.bundle.bundle import Bundle
from tfexport.contract import ENCODER, FLOAT, REORDER, WEIGHTS, AlignmentHeads, Form, GraphEntry, ModelSpec, Precision
from tfexport.errors import BundleError, GraphError, raise_all
from tfexport.export.write import write_graphs
from tfexport.nn.directory import load_weights


def write_cast(
    model: nn.Module,
    spec: ModelSpec,
    directory: Path,
    *,
    forms: Sequence[Form],
    opset: int,
    alignment: AlignmentHeads | None = None,
    speculation: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Write the graphs of a model in the precision that `spec` names; the model stays as it is.

    See `write_graphs` for the rest.
    """
    dtype = getattr(torch, FLOAT[spec.precision])
    shared = {id(parameter): parameter for parameter in model.parameters() if parameter.dtype == dtype}
    cast = copy.deepcopy(model, shared).to(dtype)
    return write_graphs(
        cast,
        spec,
        directory,
        forms=forms,
        opset=opset,
        alignment=alignment,
        speculation=speculation,
        report=report,
    )


def write_precision(
    bundle: Bundle,
    precision: Precision,
    form: Form | None,
    directory: Path,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, GraphEntry]:
    """Rebuild the model, cast it and trace it.

    A wider precision than the bundle's gives back no digits that its weights have lost.

    Args:
        bundle: opened and checked.
        precision: of the new graphs.
        form: of the decoder, the only one written; None for an encoder alone.
        directory: existing; receives the graphs and a weight file of their own.
        report: told what happens, a line at a time.

    Returns:
        What a manifest says of each graph, by its name.

    Raises:
        BundleError: the bundle holds graphs only.
        CheckpointError: the weights do not fit the model.
        GraphError: lists every weight that is too large for the precision.
    """
    manifest = bundle.manifest
    if manifest.config is None or WEIGHTS not in manifest.files:
        raise BundleError(
            f"{bundle.path}: holds graphs in {manifest.spec.precision} and no model to cast; "
            f"export it again with: tfexport onnx SOURCE --precision {precision}"
        )
    report(f"casting the model to {precision}")
    model = load_weights(bundle.file(WEIGHTS), manifest.config).to(getattr(torch, FLOAT[precision]))
    problems = [
        f"{name} is too large for {precision}, use bf16 or fp32"
        for name, parameter in model.named_parameters()
        if not parameter.isfinite().all()
    ]
    raise_all(GraphError, str(bundle.path), problems)
    spec = replace(manifest.spec, precision=precision)
    opset = manifest.graphs[ENCODER].opset
    forms = () if form is None else (form,)
    graphs = write_graphs(model, spec, directory, forms=forms, opset=opset, report=report)
    graphs.pop(REORDER, None)  # made apart for every engine
    return graphs
