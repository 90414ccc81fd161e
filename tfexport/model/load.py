"""Open and check a bundle, and load it on a backend."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Literal

from tfexport._arguments import as_list, is_whole
from tfexport._io.names import PROCESSOR, TARGET_TOKENIZER, TOKENIZER, checked_path
from tfexport._io.signature import TrustedKeys
from tfexport.bundle.bundle import Bundle, check_weights, open_bundle, read_defaults
from tfexport.bundle.contents import check_engines
from tfexport.bundle.processor import ProcessorConfig
from tfexport.contract import Device, Variant
from tfexport.decode.offline import warm_up as run_warm_up
from tfexport.errors import BundleError, ConfigError, TfexportError, shortened
from tfexport.features.processor import FeatureProcessor
from tfexport.model.model import Model
from tfexport.runtime.registry import AUTO, LoadOptions, open_session
from tfexport.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def load(
    path: str | PathLike[str],
    *,
    backend: str = AUTO,
    variant: Variant | None = None,
    threads: int | Literal["auto"] | None = AUTO,
    device: Device = "cpu",
    engine: str | None = None,
    trusted_keys: Sequence[str | PathLike[str]] | None = None,
    warm_up: Sequence[tuple[int, int]] = (),
    form: Variant | None = None,
) -> Model:
    """Open a bundle, check all of its files, and load it on a backend.

    Args:
        path: directory of the bundle.
        backend: "ort", "eager", "trt" or "native"; "auto" uses the first of them that is installed and can run the
            bundle, and "native" before the others for small and int8 models.
        variant: decoder variant; None uses the first that the bundle has of contrib (CPU only), static and concat.
        threads: CPU threads of one call. "auto" uses all available cores, but one thread for small runs of small
            models. None lets ONNX Runtime start one on each core that it finds.
        device: "cpu", "cuda", or one of several GPUs such as "cuda:1". There is no fallback to another device. Engines
            run on the first GPU by default.
        engine: name of the engine for backend "trt"; None uses the only engine that fits this machine.
        trusted_keys: public key files. One of the keys must have signed the bundle, and the engine if one is loaded.
            None does not check signatures.
        warm_up: batches to run twice before the model is returned, as (texts, source tokens): [(1, 16), (32, 16)].
            A GPU compiles kernels and captures steps when a shape first occurs.
        form: former name of `variant`.

    Raises:
        BundleError: the bundle is missing or damaged, lacks the decoder variant, or is not signed by any of the keys.
        BackendError: the backend is not installed, or cannot run the bundle on the device.
        EngineError: the bundle has no such engine, or the engine cannot be used on this machine.
        ConfigError: an argument is invalid.
        InputError: a warm-up batch has longer sources than the model takes.
    """
    options = LoadOptions(
        backend=backend,
        variant=variant if form is None else form,
        threads=threads,
        device=device,
        engine=engine,
        is_shared=threading.active_count() > 1,
    )
    folder, batches = checked_path(path, "load: path"), _warm_up_batches(warm_up)
    keys = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    bundle = open_bundle(folder, weights=False, trusted_keys=keys)
    check_engines(bundle.path)
    tokenizer, processor, defaults = load_tokenizer(bundle), load_processor(bundle), read_defaults(bundle)
    with ThreadPoolExecutor(1) as pool:  # hashing the weights takes as long as loading
        checked = pool.submit(check_weights, bundle)
        try:
            session = open_session(bundle, options)
        except TfexportError:
            checked.result()  # changed weights explain the failure better
            raise
    threads = getattr(session, "threads", None) if options.device == "cpu" else None
    defaults = defaults.within(bundle.manifest.spec.max_target_length)
    model = Model(session, tokenizer, defaults, processor=processor, manifest=bundle.manifest, threads=threads)
    try:
        checked.result()
        # The second run of a batch captures the steps whose inputs come from the host.
        for rows, source_len in (*batches, *batches):
            run_warm_up(session, rows, source_len)
    except BaseException:
        model.close()
        raise
    used = f" with {threads.encoder} threads for the encoder, {threads.decoder} for a step" if threads else ""
    _log.info("%s: loaded on %s, %s%s", path, session.backend, options.device, used)
    return model


def _warm_up_batches(argument: object) -> list[list[int]]:
    listed = as_list(argument)
    batches = [[]] if listed is None else [as_list(batch) or [] for batch in listed]
    if not all(len(batch) == 2 and all(is_whole(size) and size >= 1 for size in batch) for batch in batches):
        expected = "pairs of a number of texts and a number of source tokens, such as [(32, 16)]"
        raise ConfigError(f"load: warm_up is {shortened(argument)}, expected {expected}")
    return batches


def load_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """Read the tokenizer of a bundle; return None if it has none."""
    manifest = bundle.manifest
    if not manifest.has_tokenizer:
        return None
    target = bundle.file(TARGET_TOKENIZER) if TARGET_TOKENIZER in manifest.files else None
    return Tokenizer.load(bundle.file(TOKENIZER), manifest.spec, target=target, text=manifest.text)


def load_processor(bundle: Bundle) -> FeatureProcessor | None:
    """Read the processor of a bundle, which computes features; None if it has none."""
    if PROCESSOR not in bundle.manifest.files:
        return None
    try:
        return ProcessorConfig.read(bundle.file(PROCESSOR), bundle.manifest.spec).processor
    except ConfigError as error:
        raise BundleError(f"bundle {bundle.path}: {error}; export it again") from error
