"""ZeRO: flat buckets and data-parallel reduction (stage 0)."""
