"""Compression on DDP, FSDP, DeepSpeed and the mesh."""
