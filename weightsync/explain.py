"""What a plan says about itself: a summary that crosses the wire, and the plain text a person reads.

The driver reads this file, so it must stay free of torch.
"""

from __future__ import annotations

from collections import defaultdict

from weightsync.spec import Struct, Traffic

SAME_GPU_BYTES_PER_S = 4.3e12
"""Read plus write, a copy inside one H200, measured: a byte that is copied counts twice."""
PEER_BYTES_PER_S = 390e9
"""One direction from a peer GPU over NVLink, measured between two H200."""

_MAX_PAIRS = 32
_MAX_NAMES = 20


class PlanSummary(Struct):
    """A plan without its copies. Sizes in bytes: ``num_bytes`` what one push moves, ``model_bytes`` each tensor once.

    ``traffic`` has a row for each engine rank and trainer rank that it reads. ``host_memory`` says whether any end of
    a copy is in host memory. ``left_out``, ``constants``, ``derived``, ``opaque`` (with the reason) and ``ignored``
    (buffers that no engine reads) list what no push writes or sends.
    """

    route: str
    num_tensors: int
    num_bytes: int
    model_bytes: int
    traffic: list[Traffic]
    host_memory: bool
    left_out: list[str] = []
    constants: list[str] = []
    derived: list[str] = []
    opaque: dict[str, str] = {}
    ignored: list[str] = []
    notes: list[str] = []

    def explain(self) -> str:
        """The report as plain text of at most 100 columns, names aside."""
        if not self.traffic:
            return "\n\n".join([_head(self), _uncovered(self)]) + "\n"
        parts = [_head(self), _by_engine_rank(self.traffic), _by_pair(self.traffic), _floor(self), _uncovered(self)]
        return "\n\n".join(part for part in parts if part) + "\n"


def floor_s(summary: PlanSummary) -> float | None:
    """The shortest time in which the bytes can move, in seconds; None in host memory, for which we claim nothing,
    or if no bytes move.

    Inside a GPU each byte is read and written; between GPUs a link carries each byte once, in and out separately. GPUs
    work side by side, so the slowest one decides.
    """
    if summary.host_memory or not summary.traffic:
        return None
    return max(2 * _busiest(summary, True) / SAME_GPU_BYTES_PER_S, _busiest(summary, False) / PEER_BYTES_PER_S)


def _busiest(summary: PlanSummary, same_device: bool) -> int:
    """The most bytes that one engine rank takes in or one trainer rank gives, inside its GPU or between GPUs."""
    num_bytes: dict[tuple, int] = defaultdict(int)
    for row in summary.traffic:
        if row.same_device == same_device:
            num_bytes["engine", row.engine, row.engine_rank] += row.num_bytes
            num_bytes["trainer", row.trainer_rank] += row.num_bytes
    return max(num_bytes.values(), default=0)


def _head(summary: PlanSummary) -> str:
    trainers = len({row.trainer_rank for row in summary.traffic})
    ranks = len({(row.engine, row.engine_rank) for row in summary.traffic})
    copies = sum(row.num_copies for row in summary.traffic)
    return (
        f"route {summary.route}: {summary.num_tensors} tensors, {size(summary.model_bytes)} once; a push moves "
        f"{size(summary.num_bytes)} in {copies} copies\nfrom {trainers} trainer ranks to {ranks} engine ranks"
    )


def _by_engine_rank(traffic: list[Traffic]) -> str:
    rows: dict[tuple[str, int, str], list[Traffic]] = defaultdict(list)
    for row in traffic:
        rows[row.engine, row.engine_rank, row.route].append(row)
    header = ("engine", "rank", "route", "same GPU", "elsewhere", "copies", "reads from")
    lines = ["{:<32} {:>4} {:>7} {:>11} {:>11} {:>8} {:>12}".format(*header)]
    for (engine, rank, route), reads in rows.items():
        here = sum(r.num_bytes for r in reads if r.same_device)
        away = sum(r.num_bytes for r in reads if not r.same_device)
        lines.append(
            f"{engine:<32} {rank:>4} {route:>7} {size(here):>11} {size(away):>11} "
            f"{sum(r.num_copies for r in reads):>8} {len(reads):>6} ranks"
        )
    return "\n".join(lines)


def _by_pair(traffic: list[Traffic]) -> str:
    if len(traffic) > _MAX_PAIRS:
        return f"({len(traffic)} pairs of engine and trainer rank, not listed)"
    lines = [f"{'engine':<32} {'rank':>4}  {'trainer rank':>12} {'bytes':>11} {'copies':>8}  same GPU"]
    for row in traffic:
        lines.append(
            f"{row.engine:<32} {row.engine_rank:>4}  {row.trainer_rank:>12} {size(row.num_bytes):>11} "
            f"{row.num_copies:>8}  {'yes' if row.same_device else 'no'}"
        )
    return "\n".join(lines)


def _floor(summary: PlanSummary) -> str:
    floor = floor_s(summary)
    if floor is None:
        return "physical floor: no claim, an end of the copies is in host memory"
    inside, between = size(_busiest(summary, True)), size(_busiest(summary, False))
    return (
        f"physical floor: {floor * 1e3:.2f} ms; the busiest GPU decides: at most {inside} inside one GPU,\n"
        f"at most {between} from or to peers\n"
        f"assumed, measured on H200: {SAME_GPU_BYTES_PER_S / 1e12:.1f} TB/s read plus write inside a GPU (each byte "
        f"counts twice),\n{PEER_BYTES_PER_S / 1e9:.0f} GB/s from a peer GPU"
    )


def _uncovered(summary: PlanSummary) -> str:
    opaque = [f"{name}: {reason}" for name, reason in summary.opaque.items()]
    sections = [
        ("trainer tensors left out, as configured", summary.left_out),
        ("buffers that no engine reads", summary.ignored),
        ("engine constants, which no push writes", summary.constants),
        ("derived after loading", summary.derived),
        ("opaque: the trace could not follow them", opaque),
        ("notes", summary.notes),
    ]
    proved = "every element of every engine parameter not named below is written exactly once"
    lines = [f"coverage: {proved if summary.traffic else 'not proved, no engine said what it needs'}"]
    for title, names in sections:
        if names:
            lines.append(f"{title} ({len(names)}):")
            lines += [f"  {name}" for name in names[:_MAX_NAMES]]
            lines += [f"  ... and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return "\n".join(lines)


def size(num_bytes: int) -> str:
    """``16.38 GB``: bytes in decimal units."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
