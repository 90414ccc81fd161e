"""Names of files that several stages use."""

# Model directories and Hugging Face checkpoints.
CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
# Model directories and bundles.
TOKENIZER = "tokenizer.json"
GENERATION = "generation.json"
TARGET_TOKENIZER = "target_tokenizer.json"
# Model directories; bundles store it in the manifest.
TEXT = "text.json"
# Imported model directories.
CERTIFICATE = "certificate.json"
LAYOUT = "layout.yaml"
# Bundles; the names of the weight files are in `tfexport.contract`.
MANIFEST = "manifest.json"
# Engines of a bundle; the folder of kernels has one folder per GPU, in which files are named after the plan.
ENGINE_MANIFEST = "engine.json"
BUILD_LOG = "build.log"
KERNELS = "kernels"
KERNELS_INDEX = "kernels.json"
KERNELS_SUFFIX = ".kernels"
SIGNATURE = "manifest.json.sig"
ENGINE_SIGNATURE = "engine.json.sig"
