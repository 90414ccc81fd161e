"""The names of files that several stages know; those of one stage alone stand with it."""

# A model directory, and a checkpoint as Hugging Face writes it.
CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
# A model directory and a bundle.
TOKENIZER = "tokenizer.json"
GENERATION = "generation.json"
# Of the target, where it has one of its own.
TARGET_TOKENIZER = "target_tokenizer.json"
# A model directory; a bundle has it in its manifest.
TEXT = "text.json"
# A model directory that was imported.
CERTIFICATE = "certificate.json"
LAYOUT = "layout.yaml"
# A bundle; the weights that its graphs share are part of the graph contract, see `tfexport.contract`.
MANIFEST = "manifest.json"
# An engine of a bundle; the folder of its kernels has a folder for each GPU, in which files are named by the plan.
ENGINE_MANIFEST = "engine.json"
BUILD_LOG = "build.log"
KERNELS = "kernels"
KERNELS_INDEX = "kernels.json"
KERNELS_SUFFIX = ".kernels"
# Beside a manifest, see `tfexport._io.signature`.
SIGNATURE = "manifest.json.sig"
ENGINE_SIGNATURE = "engine.json.sig"
