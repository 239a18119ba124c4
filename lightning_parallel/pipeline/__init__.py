"""Pipeline parallelism: consecutive layers on consecutive ranks, microbatches flowing through them."""

__all__: list[str] = []
