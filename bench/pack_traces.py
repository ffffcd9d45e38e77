"""Make the traces that biphase ships from the published files: ``python bench/pack_traces.py FOLDER``.

FOLDER holds ``azure_2023_conv.csv`` and ``azure_2023_code.csv`` (github Azure/AzurePublicDataset,
data/AzureLLMInferenceTrace_conv.csv and _code.csv) and ``mooncake_synthetic_1000.jsonl`` (the first 1,000 rows of
FAST25-release/traces/synthetic_trace.jsonl, github kvcache-ai/Mooncake). They are compressed and changed in no other
way; the same input gives the same bytes.
"""

import gzip
import sys
from pathlib import Path

NAMES = ("azure_2023_conv.csv", "azure_2023_code.csv", "mooncake_synthetic_1000.jsonl")
SHIPPED = Path(__file__).parents[1] / "src" / "biphase" / "client" / "traces"


def main() -> None:
    """Compress each file into the package."""
    source = Path(sys.argv[1])
    for name in NAMES:
        packed = gzip.compress((source / name).read_bytes(), compresslevel=9, mtime=0)
        (SHIPPED / f"{name}.gz").write_bytes(packed)
        print(f"{name}.gz: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
