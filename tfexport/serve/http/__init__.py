"""The engine over HTTP: a Starlette app after the Open Inference Protocol and Triton's generate extension."""
