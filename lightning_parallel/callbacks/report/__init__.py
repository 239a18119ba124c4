"""The report of a profiled run: a page, its data, a trace of all ranks, and the comparison of two runs."""

from lightning_parallel.callbacks.report.profile_report import ProfileReport

__all__ = ["ProfileReport"]
