"""Run the command line: `python -m lightning_parallel`."""

from lightning_parallel.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
