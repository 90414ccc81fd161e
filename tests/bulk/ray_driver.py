"""A process that decodes a file on a cluster, and says on standard output how far it is."""

from __future__ import annotations

import sys

import ray

from tfexport.bulk.config import BulkConfig
from tfexport.bulk.ray import Workers, generate_file
from tfexport.errors import TfexportError


def main(address: str, bundle: str, source: str, target: str) -> None:
    """Run; exits with 1 and one line where it is refused."""
    ray.init(address=address, log_to_driver=False, _node_ip_address=address.partition(":")[0])
    try:
        summary = generate_file(
            bundle,
            source,
            target,
            BulkConfig(rows_per_part=512),
            workers=Workers(least=2),
            report=lambda line: print(line, flush=True),
            on_progress=lambda progress: print(progress.done, flush=True),
        )
    except TfexportError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print(f"decoded {summary.num_decoded} of {summary.num_rows}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
