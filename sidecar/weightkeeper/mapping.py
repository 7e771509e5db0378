"""A keeper's weights, mapped into this process, together with the lease that goes with them."""

import os
import weakref

import torch
from torch import nn

from weightkeeper import memory
from weightkeeper.client import Session
from weightkeeper.errors import SlotsError
from weightkeeper.layout import Layout
from weightkeeper.tensors import bytes_of


class Mapping:
    """What one grant gave: the layout, all bytes as one tensor, and the open session.

    Attributes:
        whole: uint8; the memory stays mapped while any view of it lives.
        extent: first address and bytes.
    """

    def __init__(self, session: Session, layout: Layout, whole: torch.Tensor, extent: tuple[int, int]):
        self.session = session
        self.layout = layout
        self.whole = whole
        self.extent = extent

    def attach(self, model: nn.Module, *, keep: bool, release: bool) -> None:
        """Let the lease last as long as the model; or end it now, and ask for release if wanted (copy mode)."""
        del self.whole
        if keep:
            weakref.finalize(model, self.session.close)
            return
        if release:
            self.session.release()
        self.session.close()

    def close(self) -> None:
        """Give the lease back; views that exist stay valid."""
        self.session.close()


def open_mapping(session: Session, fields: dict[str, str], mode: str, ordinal: int = 0) -> Mapping:
    """Ask for the weights with this fingerprint and map them on the GPU `ordinal` of this process, or in host memory.

    Raises:
        MismatchError: the keeper's weights are others; every differing field is named.
        MemoryKindError: the memory cannot be mapped here.
        CacheUnusableError: the keeper refused or broke off.
    """
    granted = session.map(fields, mode)
    try:
        region = memory.of_kind(granted.grant.kind, ordinal).map(granted.descriptors, granted.grant.sizes)
    finally:
        for descriptor in granted.descriptors:
            os.close(descriptor)
    layout = granted.grant.layout
    if layout.nbytes > region.nbytes:
        region.close()
        raise SlotsError(f"the keeper's layout needs {layout.nbytes} bytes and its memory has {region.nbytes}")
    return Mapping(session, layout, bytes_of(region), (region.address, region.nbytes))
