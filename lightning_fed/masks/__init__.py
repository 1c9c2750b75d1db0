"""Masks that go over any server rule."""

from lightning_fed.masks.base import Mask
from lightning_fed.masks.sign_agreement import SignAgreement

__all__ = ["Mask", "SignAgreement"]
