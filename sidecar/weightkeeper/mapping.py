"""A keeper's weights, mapped into this process, together with the lease that goes with them."""

import weakref

import torch
from torch import nn

from weightkeeper import memory
from weightkeeper.client import Granted, Session
from weightkeeper.errors import SlotsError
from weightkeeper.frames import close_all
from weightkeeper.offering import Lease, Source, offer_of
from weightkeeper.tensors import bytes_of


class Mapping:
    """What one grant gave: the layout, all bytes as one tensor, the open session, and the segments' descriptors.

    Attributes:
        whole: uint8; the memory stays mapped while any view of it lives.
        extent: first address and bytes.

    Args:
        source: None in copy mode, where the engine needs no keeper afterwards.
    """

    def __init__(
        self,
        session: Session,
        granted: Granted,
        whole: torch.Tensor,
        extent: tuple[int, int],
        source: Source | None,
    ):
        self.session = session
        self.layout = granted.grant.layout
        self.whole = whole
        self.extent = extent
        self._granted = granted
        self._lease = None if source is None else Lease(session, offer_of(granted, source))

    def attach(self, model: nn.Module, *, release: bool) -> None:
        """Let the lease last as long as the model, also with the keepers after this one.

        In copy mode, end it now, and ask for release if wanted.
        """
        del self.whole
        if self._lease is not None:
            weakref.finalize(model, self._lease.close)
            return
        try:
            if release:
                self.session.release()
        finally:
            self.close()

    def close(self) -> None:
        """Give the lease back; views that exist stay valid."""
        if self._lease is not None:
            self._lease.close()
            return
        close_all(self._granted.descriptors)
        self.session.close()


def open_mapping(
    session: Session, fields: dict[str, str], mode: str, ordinal: int = 0, source: Source | None = None
) -> Mapping:
    """Ask for the weights with this fingerprint and map them on the GPU `ordinal` of this process, or in host memory.

    Raises:
        MismatchError: the keeper's weights are others; every differing field is named.
        MemoryKindError: the memory cannot be mapped here.
        CacheUnusableError: the keeper refused or broke off.
    """
    granted = session.map(fields, mode)
    try:
        region = memory.of_kind(granted.grant.kind, ordinal).map(granted.descriptors, granted.grant.sizes)
        layout = granted.grant.layout
        if layout.nbytes > region.nbytes:
            region.close()
            raise SlotsError(f"the keeper's layout needs {layout.nbytes} bytes and its memory has {region.nbytes}")
    except BaseException:
        close_all(granted.descriptors)
        raise
    return Mapping(session, granted, bytes_of(region), (region.address, region.nbytes), source)
