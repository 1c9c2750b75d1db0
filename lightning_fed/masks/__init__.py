"""Masks that go over any server rule."""

from lightning_fed.masks.base import Mask
from lightning_fed.masks.magnitude_agreement import MagnitudeAgreement
from lightning_fed.masks.sand_mask import SANDMask
from lightning_fed.masks.sign_agreement import SignAgreement

__all__ = ["MagnitudeAgreement", "Mask", "SANDMask", "SignAgreement"]
