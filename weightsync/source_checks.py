"""Fingerprints of what a trainer publishes, and of the sources that it was published from. Runs in training workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weightsync.arena import Outlet
from weightsync.fingerprint import Fingerprinter, fingerprint
from weightsync.spec import SourceRegion
from weightsync.trainers import Held, Reader

Items = list[tuple[torch.Tensor, Sequence[int], torch.dtype]]


class SourceChecks:
    """The regions of one export, ready to be fingerprinted at every push.

    ``views`` is the published memory by shard index, ``held`` the tensors at the same indices. Valid while both stay
    where they are. Keeps them alive.
    """

    def __init__(
        self, views: Sequence[torch.Tensor | None], held: Sequence[Held], regions: Sequence[SourceRegion]
    ) -> None:
        self.regions = list(regions)
        self._views = [_view_of(views, region) for region in regions]
        self._held = [held[region.view.storage] for region in regions]
        published: Items = []
        sources: Items = []
        self._computed: list[int] = []
        for number, (region, view, own) in enumerate(zip(regions, self._views, self._held, strict=True)):
            published.append((_region(view, region), region.box.offset, view.dtype))
            if own.compute is not None or not _lie_alike(view, own.tensor):
                self._computed.append(number)
            else:
                sources.append((_region(own.tensor, region), region.box.offset, view.dtype))
        self._published = Fingerprinter(published)
        self._sources = self._published if _same(published, sources) else Fingerprinter(sources)

    @property
    def in_place(self) -> bool:
        """Whether the sources are what is published."""
        return self._sources is self._published and not self._computed

    def start_published(self) -> Callable[[], list[int]]:
        """Begin the fingerprints of published memory; what is returned waits for them, one a region."""
        return self._published.start()

    def start_sources(self) -> Callable[[], list[int]]:
        """As ``start_published``, of the sources as they are now, in the published dtype."""
        finish = self._sources.start()
        computed = self._of_computed()

        def finished() -> list[int]:
            plain = iter(finish())
            return [computed[i] if i in computed else next(plain) for i in range(len(self.regions))]

        return finished

    def _of_computed(self) -> dict[int, int]:
        """By region's number, of what is computed, or lies otherwise than it was published: one tensor at a time."""
        numbers: dict[int, int] = {}
        last, dense = -1, torch.empty(0)
        for number in self._computed:
            region, own = self.regions[number], self._held[number]
            if region.view.storage != last:  # regions come shard by shard
                source = own.tensor if own.compute is None else own.compute(own.tensor)
                last, dense = region.view.storage, source.contiguous()
            numbers[number] = fingerprint(_region(dense, region), region.box.offset, self._views[number].dtype)
        return numbers


class KeptChecks:
    """The checks of the last push, made anew when the outlet, the tensors' places or the regions are others."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._reading = -1
        self._made: SourceChecks | None = None

    def forget(self) -> None:
        """The outlet is another, or gone."""
        self._made = None

    def start_published(
        self, outlet: Outlet, held: Sequence[Held], regions: Sequence[SourceRegion]
    ) -> Callable[[], list[int]]:
        """Begin the fingerprints of what is published; of its sources where it never lies there all at once."""
        if not regions:
            return list
        checks = self._of(outlet, held, regions)
        return checks.start_published() if outlet.num_rounds == 1 else checks.start_sources()

    def of_sources(
        self, outlet: Outlet, held: Sequence[Held], regions: Sequence[SourceRegion], published: list[int]
    ) -> list[int]:
        """Fingerprints of the sources now. Not made where they are what is published: then the engine's own tell.

        Whatever was written there before it was copied differs from ``published`` in the engine, and what is written
        afterwards does no harm.
        """
        if not regions:
            return []
        checks = self._of(outlet, held, regions)
        return published if checks.in_place else checks.start_sources()()

    def _of(self, outlet: Outlet, held: Sequence[Held], regions: Sequence[SourceRegion]) -> SourceChecks:
        made = self._made
        if made is None or self._reading != self._reader.reading or made.regions != regions:
            made = SourceChecks(outlet.views, held or self._reader.read(), regions)
            self._made, self._reading = made, self._reader.reading
        return made


def _view_of(views: Sequence[torch.Tensor | None], region: SourceRegion) -> torch.Tensor:
    view = views[region.view.storage]
    assert view is not None, f"a region of shard {region.view.storage}, of which this rank holds nothing"
    return view


def _region(tensor: torch.Tensor, region: SourceRegion) -> torch.Tensor:
    start = tensor.storage_offset() + region.view.offset
    return tensor.as_strided(region.box.size, region.view.strides, start)


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)


def _same(published: Items, sources: Items) -> bool:
    """Whether the sources are what is published: everything in place, nothing computed."""
    return len(published) == len(sources) and all(
        p[0].data_ptr() == s[0].data_ptr() and p[0].dtype == s[0].dtype for p, s in zip(published, sources)
    )
