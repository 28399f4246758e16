"""The languages of calibration texts, all written for this package."""

from __future__ import annotations

from minikv.calibration.languages.base import Fact, Language
from minikv.calibration.languages.english import ENGLISH
from minikv.calibration.languages.french import FRENCH
from minikv.calibration.languages.german import GERMAN
from minikv.calibration.languages.russian import RUSSIAN
from minikv.calibration.languages.spanish import SPANISH

__all__ = ["LANGUAGES", "Fact", "Language"]

LANGUAGES = (ENGLISH, GERMAN, FRENCH, SPANISH, RUSSIAN)
