"""Predicts what failures cost a long run, and what the link between two sites costs it. Formulas only: nothing runs.

Young (1974), "A first order approximation to the optimum checkpoint interval"; Daly (2006), "A higher order estimate of
the optimum checkpoint interval for restart dumps". Kokolis et al. (2024, arXiv:2410.21680) define ETTR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Failures", "SiteLink"]


@dataclass(frozen=True)
class Failures:
    """Independent failures of devices, each of which ends the run, and their cost.

    Args:
        devices: Devices of the run.
        device_mtbf_s: Mean seconds between failures of one device.
        stall_s: Seconds by which one checkpoint delays training.
        restart_s: Seconds from a failure to the next step, without the repeated steps.

    Raises:
        ValueError: If an argument is not positive.
    """

    devices: int
    device_mtbf_s: float
    stall_s: float
    restart_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive; got {value}")

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the run."""
        return self.device_mtbf_s / self.devices

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints at which least time is lost, by Daly's formula."""
        stall, mtbf = self.stall_s, self.mtbf_s
        if stall >= 2 * mtbf:
            return mtbf
        ratio = math.sqrt(stall / (2 * mtbf))
        # Young's sqrt(2 * stall * mtbf), with two more terms of the series, which count where checkpoints are slow.
        return math.sqrt(2 * stall * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - stall

    def productive_share(self, interval_s: float | None = None) -> float:
        """Return ETTR: the seconds of steps that count, relative to all seconds of the run.

        Args:
            interval_s: Seconds of training between two checkpoints; by default the best.
        """
        interval = self.interval_s if interval_s is None else interval_s
        # For exponential times between failures, restarts included, which may fail as well (Daly, equation 13).
        exponent = (interval + self.stall_s) / self.mtbf_s
        if exponent + self.restart_s / self.mtbf_s > _MOST_EXPONENT:
            return 0.0
        segment_s = self.mtbf_s * math.exp(self.restart_s / self.mtbf_s) * math.expm1(exponent)
        return interval / segment_s


_MOST_EXPONENT = 700.0  # `math.exp` overflows beyond


@dataclass(frozen=True)
class SiteLink:
    """The link between two sites that train independently and average their drifts every few steps.

    Each site has the mean of its own replicas before. Then each site sends it to the other site.

    Args:
        parameters: Trained parameters of the model.
        bits: Bits of each value on the link: 32 for full drifts, 4 for `Quantize(4)`.
        bytes_per_s: Bandwidth of the link, in one direction.
        latency_s: Latency of one message.
    """

    parameters: float
    bits: float
    bytes_per_s: float
    latency_s: float = 0.0

    @property
    def average_s(self) -> float:
        """Seconds of one average over both sites; both directions carry it at once."""
        return self.latency_s + self.parameters * self.bits / 8 / self.bytes_per_s

    def share(self, step_s: float, local_steps: int) -> float:
        """Return the share of the time that averages take, if training waits for them."""
        return self.average_s / (self.average_s + local_steps * step_s)

    def local_steps(self, step_s: float, share: float = 0.05) -> int:
        """Return the least number of local steps at which averages take at most `share` of the time."""
        return max(1, math.ceil(self.average_s * (1 - share) / (share * step_s)))
