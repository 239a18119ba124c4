"""The report of a profiled run: a page, the same as data, a trace of all ranks, and the comparison of two runs."""

from lightning_parallel.callbacks.report.profile_report import ProfileReport

__all__ = ["ProfileReport"]
