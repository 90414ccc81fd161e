"""Write the model card of a bundle, as the Hugging Face Hub reads it."""

from __future__ import annotations

import json
import re
import shlex

from tfexport._io.extras import extra_command
from tfexport.bundle.manifest import Draft, kind_of
from tfexport.contract import DECODER
from tfexport.sources import FRAMES, ImageSource, TokenSource

# The Hub's names of licenses have a version, with few exceptions.
_LICENSE = re.compile(r"[a-z0-9.+-]*\d[a-z0-9.+-]*|mit|bsd|cc|gemma|isc|openrail|other|unknown|unlicense|zlib")


def render_card(draft: Draft, *, has_tokenizer: bool, has_processor: bool = False) -> str:
    """Return the model card of a bundle with this description."""
    spec, named, origin = draft.spec, draft.identity, draft.provenance.origin if draft.provenance else {}
    kind, source = kind_of(spec), origin.get("repository", "")
    license_ = named.license or origin.get("license", "")
    is_known = _LICENSE.fullmatch(license_.lower())
    front = {
        "license": license_.lower() if is_known else license_ and "other",
        "license_name": "" if is_known else license_,
        "base_model": source,
        "pipeline_tag": origin.get("pipeline_tag"),
        "library_name": "tfexport",
        "tags": ["onnx", kind],
    }
    facts = {
        "License": license_ or "not stated",
        "Version": named.version or "",
        "Status": str(draft.proof),
        "Precision": draft.quantization.precision if draft.quantization else spec.precision,
        "Decoder variants": ", ".join(variant for variant, graph in DECODER.items() if graph in draft.graphs),
        "Longest source": f"{spec.max_source_length} {spec.source.unit}",
        "Longest target": f"{spec.max_target_length} tokens" if spec.has_decoder else "",
        "Repository": source and f"{source}, commit {origin.get('commit')}",
        **{f"Weights from {file}": f"sha256 {entry.sha256}" for file, entry in draft.checkpoint.items()},
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items() if value]
    lines = ["---", *lines, "---", "", f"# {_escaped(named.name or source or f'{kind} bundle')}", ""]
    lines += [f"An {kind} transformer in ONNX, exported by tfexport. Its outputs can be wrong.", ""]
    lines += [f"- {_escaped(fact)}: {_escaped(value)}" for fact, value in facts.items() if value]
    lines += ["", f"Install with `{extra_command('cpu,serve')}`, and run in this directory:", ""]
    return "\n".join(lines) + _examples(draft, has_tokenizer and (has_processor or bool(spec.source_vocab)))


def _examples(draft: Draft, reads_texts: bool) -> str:
    spec, kind, imports, command = draft.spec, draft.spec.source, "import tfexport", "inspect ."
    verb, verb_of_ids = ("generate", "generate_ids") if spec.has_decoder else ("embed", "embed")
    if reads_texts:
        text = _text(draft)
        command, call = f"{verb} . {shlex.quote(text)}", f"{verb}([{json.dumps(text, ensure_ascii=False)}])"
    elif isinstance(kind, TokenSource):
        ids = [i for i in range(min(kind.vocab, 9)) if i != kind.pad_id][:3]
        call = f"{verb_of_ids}([{ids}])"
    else:
        longest = kind.sizes(spec.max_source_length)
        shape = kind.shape if isinstance(kind, ImageSource) else (longest[FRAMES], kind.dim)
        imports, call = "import numpy as np\nimport tfexport", f"{verb_of_ids}([np.zeros({shape}, np.float32)])"
    python = f'{imports}\n\nmodel = tfexport.load(".")\nprint(model.{call})'
    blocks = (("sh", f"tfexport {command}"), ("python", python), ("sh", "tfexport serve model=."))
    return "".join(f"\n```{language}\n{code}\n```\n" for language, code in blocks)


def _text(draft: Draft) -> str:
    """Return a short recorded text, or a file that the model could read."""
    if not draft.spec.source_vocab:
        return "picture.png" if draft.spec.image else "recording.wav"
    texts = [sample.text for sample in draft.text.samples]
    return next((text for text in texts if text.isprintable() and text[:1].isalnum() and len(text) < 60), "Hello")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|&~]|:(?=//))", r"\\\1", text)  # what Markdown and HTML interpret
